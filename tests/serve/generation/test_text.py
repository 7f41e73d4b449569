from __future__ import annotations

from typing import Any

import pytest

from kvboost.serve.generation.text import BlankHolder, TagFinder, token_bytes
from tests.helpers.tokenizer import byte_tokenizer, pieces_tokenizer

_BYTES = byte_tokenizer()


_PIECES = pieces_tokenizer()


@pytest.mark.parametrize("tokenizer", [_BYTES, _PIECES], ids=["bytes", "pieces"])
def test_bytes_of_tokens(tokenizer: Any) -> None:
    of = token_bytes(tokenizer)
    ids = tokenizer("Grüße 🙂", add_special_tokens=False)["input_ids"]
    assert len(ids) >= len("Grüße 🙂".encode()) - 1
    assert b"".join(of(token) for token in ids).strip() == "Grüße 🙂".encode()


def test_bytes_of_words_and_special_tokens() -> None:
    assert token_bytes(_PIECES)(257) == b" der"
    assert token_bytes(_BYTES)(2) == b"</s>"


@pytest.mark.parametrize("step", [1, 2, 100])
def test_a_tag_is_found_across_pieces(step: int) -> None:
    text, before = "a<<ta<tag>b<tag>", ""
    finder = TagFinder("<tag>")
    for start in range(0, len(text), step):
        piece, rest = finder.add(text[start : start + step])
        before += piece
        if rest is not None:
            assert (before, rest + text[start + step :]) == ("a<<ta", "b<tag>")
            return
    pytest.fail("the tag was not found")


def test_half_of_a_tag_is_given_back_at_the_end() -> None:
    finder = TagFinder("<tag>")
    assert finder.add("a<ta") == ("a", None)
    assert finder.end() == "<ta"


def test_blanks_wait_for_other_text() -> None:
    holder = BlankHolder(drop_first=True)
    assert [holder.add(text) for text in (" \n", "\ta ", "\n", "b\n")] == ["", "a", "", " \nb"]
    assert holder.end() == "\n"
    assert BlankHolder().add(" a") == " a"
