"""Passages in changing order: as retrieved, and arranged so that more of the prompt is reused exactly.

python examples/rag.py [--model MODEL]
"""

from __future__ import annotations

import argparse

from kvboost import KVBoost

HEAD = "Answer from the passages.\n\n"
PASSAGES = [
    "The lighthouse of Brunn was built in 1871 by the harbour's guild, on the rock east of the pier.\n\n",
    "Its first lamp burned rapeseed oil. In 1924 it was electrified, and the keeper's house became a school.\n\n",
    "The storm of 1953 broke its gallery. It was mended with steel from the old railway bridge.\n\n",
    "Since 1998 it has had no keeper. Visitors may climb its 174 steps on Sundays.\n\n",
]
REQUESTS = [
    ((0, 1, 2), "When was it built?"),
    ((2, 0, 1), "What broke in 1953?"),
    ((1, 2, 0), "What did the first lamp burn?"),
    ((0, 2, 3), "When may it be visited?"),
]


def main() -> None:
    """Send the same requests both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    with KVBoost.from_pretrained(args.model) as engine:
        for arranged in (False, True):
            engine.clear()
            reused = prompts = 0
            for retrieved, question in REQUESTS:
                documents = [PASSAGES[index] for index in retrieved]
                asked = f"Question: {question}\nAnswer:"
                parts = (HEAD, *documents, asked)
                if arranged:
                    parts = engine.arrange(head=HEAD, documents=documents, question=asked).parts
                tokens, boundaries = engine.join(parts)
                answer = engine.generate(tokens, boundaries=boundaries, max_new_tokens=16, temperature=0)
                reused, prompts = reused + answer.cached_tokens, prompts + answer.prompt_tokens
            print(f"{'arranged' if arranged else 'as retrieved'}: {reused} of {prompts} prompt tokens reused exactly")


if __name__ == "__main__":
    main()
