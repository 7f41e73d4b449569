"""Eight turns of a chat: how many tokens each prompt has, and how many of them were computed.

python examples/multiturn.py [--model MODEL]
"""

from __future__ import annotations

import argparse

from kvboost import KVBoost

QUESTIONS = [
    "What is a lighthouse?",
    "Who looks after one?",
    "How far can its light be seen?",
    "Why do some of them flash?",
    "What came before electric lamps?",
    "Are they still needed?",
    "Which is the oldest?",
    "Sum up what we said.",
]


def main() -> None:
    """Ask one question after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    messages = [{"role": "system", "content": "You answer in one sentence."}]
    with KVBoost.from_pretrained(args.model) as engine:
        for turn, question in enumerate(QUESTIONS, 1):
            messages.append({"role": "user", "content": question})
            answer = engine.chat(messages, max_new_tokens=24, temperature=0)
            messages.append({"role": "assistant", "content": answer.output_text})
            computed = answer.prompt_tokens - answer.cached_tokens
            print(f"turn {turn}: {answer.prompt_tokens} prompt tokens, {computed} computed, {answer.ttft_ms:.0f} ms")


if __name__ == "__main__":
    main()
