"""Structured answers by Outlines, attached: one text, one schema, many questions.

python examples/programs/with_outlines.py MODEL
"""

from __future__ import annotations

import argparse
import sys
from typing import Literal

import outlines
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvboost

TEXT = "The mill was built in 1840, burned down in 1911 and was rebuilt of stone. " * 12
QUESTIONS = ["When was it built?", "When did it burn down?"]


class Answer(BaseModel):
    """What every answer looks like."""

    year: Literal[1840, 1911]
    certain: bool


def main() -> None:
    """Ask the questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name on the hub")
    name = parser.parse_args().model
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    attached = kvboost.attach(model)  # the new line
    ask = outlines.Generator(outlines.from_transformers(model, tokenizer), Answer)
    for question in QUESTIONS:
        print(question, Answer.model_validate_json(ask(f"{TEXT}\n{question}\n", max_new_tokens=40, do_sample=False)))
    stats = attached.engine.cache_stats()
    print(f"{stats['cache_hits']} of {stats['cache_hits'] + stats['cache_misses']} chunks were reused")
    sys.exit(None if stats["cache_hits"] else "nothing was reused")


if __name__ == "__main__":
    main()
