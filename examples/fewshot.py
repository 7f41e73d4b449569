"""One set of examples, many inputs: the examples are prefilled once.

python examples/fewshot.py [--model MODEL]
"""

from __future__ import annotations

import argparse

from kvboost import KVBoost

SHOTS = "".join(
    f"Review: {review}\nMood: {mood}\n\n"
    for review, mood in [
        ("The soup was cold and the waiter rude.", "bad"),
        ("A wonderful evening, we will come again.", "good"),
        ("Too loud to talk, and far too expensive.", "bad"),
        ("The best bread in town, and a kind owner.", "good"),
    ]
)
INPUTS = ["The cake was dry.", "What a view!", "We waited for an hour.", "Fresh fish, friendly people."]


def main() -> None:
    """Label the inputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    with KVBoost.from_pretrained(args.model) as engine:
        engine.warm(SHOTS)
        for text in INPUTS:
            answer = engine.generate(f"{SHOTS}Review: {text}\nMood:", max_new_tokens=1, temperature=0)
            print(f"{text} ->{answer.output_text} ({answer.cached_tokens} of {answer.prompt_tokens} tokens reused)")


if __name__ == "__main__":
    main()
