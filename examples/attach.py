"""A script with plain Transformers, and one line more: the text is read once, not once for each question.

python examples/attach.py [--model MODEL]
"""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvboost

TEXT = "The mill was built in 1840, burned down in 1911 and was rebuilt of stone. " * 12
QUESTIONS = ["When was it built?", "When did it burn down?", "What was it rebuilt of?"]


def main() -> None:
    """Ask the questions, and score two answers to the last one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    with kvboost.attach(model, tokenizer) as attached:
        for question in QUESTIONS:
            inputs = tokenizer(f"{TEXT}\n{question}\n", return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
            print(question, tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        for score in attached.engine.score(f"{TEXT}\n{QUESTIONS[-1]}\n", ["Stone.", "Wood."]):
            reused, tokens = score.reuse.exact_tokens, score.reuse.exact_tokens + score.reuse.fresh_tokens
            print(f"log-probability {score.logprob:.1f} ({reused} of {tokens} tokens reused)")


if __name__ == "__main__":
    main()
