"""Which tokens at the edges of a text depend on what stands next to it.

Used for documents that prompts are searched for. A tokenizer may merge a document's first and last characters with
their neighbours; what is between does not change. Invariant: a wrong guess costs a hit, never a token: found
tokens are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_NEIGHBOURS = ("x", "1", " ", "\n", ".", '"')  # a letter, a digit, blanks and marks: tokenizers treat them differently
_CHARACTERS = 256  # enough for any word, and quick for long texts


def edge_tokens(text: str, encode: Callable[[list[str]], Sequence[Sequence[int]]]) -> tuple[int, int]:
    """How many tokens at the beginning and at the end of ``text`` may differ beside other text.

    ``encode`` is called once, with all texts that are compared.
    """
    head, tail = text[:_CHARACTERS], text[-_CHARACTERS:]
    before = [near + head for near in (*_NEIGHBOURS, head[:1])]
    after = [tail + near for near in (*_NEIGHBOURS, tail[-1:])]
    first, last, *beside = encode([head, tail, *before, *after])
    begin = max(len(first) - _common(first[::-1], other[::-1]) for other in beside[: len(before)])
    end = max(len(last) - _common(last, other) for other in beside[len(before) :])
    return begin, end


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
