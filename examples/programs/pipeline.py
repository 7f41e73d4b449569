"""Transformers' text-generation pipeline, attached: the text before each question is read once.

python examples/programs/pipeline.py MODEL
"""

from __future__ import annotations

import argparse
import sys

from transformers import pipeline

import kvboost

TEXT = "The mill was built in 1840, burned down in 1911 and was rebuilt of stone. " * 12
QUESTIONS = ["When was it built?", "When did it burn down?", "What was it rebuilt of?"]


def main() -> None:
    """Ask the questions, one by one and in a batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name on the hub")
    generator = pipeline("text-generation", model=parser.parse_args().model)
    generator.tokenizer.padding_side = "left"
    attached = kvboost.attach(generator.model)  # the new line
    prompts = [f"{TEXT}\n{question}\n" for question in QUESTIONS]
    asked = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    answers = [generator(prompt, **asked) for prompt in prompts] + generator(prompts, batch_size=3, **asked)
    for question, answer in zip(QUESTIONS * 2, answers, strict=True):
        print(question, repr(answer[0]["generated_text"]))
    stats = attached.engine.cache_stats()
    print(f"{stats['cache_hits']} of {stats['cache_hits'] + stats['cache_misses']} chunks were reused")
    sys.exit(None if stats["cache_hits"] else "nothing was reused")


if __name__ == "__main__":
    main()
