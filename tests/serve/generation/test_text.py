from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvboost.serve.generation.text import BlankHolder, Detokenizer, StopCutter, TagFinder, token_bytes
from tests.helpers.tokenizer import byte_tokenizer

_BYTES = byte_tokenizer()


def _pieces_tokenizer() -> Any:
    """As SentencePiece's models are read: words with a mark for the space, and single bytes for everything else."""
    vocab = (
        {"<unk>": 0}
        | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
        | {"▁der": 257, "▁Rest": 258, "x": 259, "▁": 260}
    )
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", clean_up_tokenization_spaces=False)


_PIECES = _pieces_tokenizer()
_OF_BYTES = token_bytes(_BYTES)
_ID_OF = {_OF_BYTES(token)[0]: token for token in range(3, 259)}


def _decode(tokenizer: Any) -> Any:
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _byte_ids(tokenizer: Any, raw: bytes) -> list[int]:
    if tokenizer is _PIECES:
        return [1 + byte for byte in raw]
    return [_ID_OF[byte] for byte in raw]


@settings(deadline=None)  # the machine may be busy
@given(st.text(max_size=30), st.sampled_from(["bytes", "pieces"]))
@example("0 𐀀", "pieces")  # a space that decodes to nothing by itself, before a character of four bytes
@example("é 0", "pieces")  # and after one of two
def test_a_text_comes_back_whole_and_in_whole_characters(text: str, kind: str) -> None:
    tokenizer = _BYTES if kind == "bytes" else _PIECES
    text = text.lstrip(" ") if kind == "pieces" else text  # that decoder drops a leading space
    detokenizer = Detokenizer(_decode(tokenizer))
    pieces = [detokenizer.add(token) for token in _byte_ids(tokenizer, text.encode())]
    assert "".join(pieces) == text, "nothing of a whole text is held back"
    assert detokenizer.end() == ""


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(0, 258), max_size=300))
def test_any_bytes_give_the_text_of_all_tokens(ids: list[int]) -> None:
    detokenizer = Detokenizer(_decode(_BYTES))
    joined = "".join(detokenizer.add(token) for token in ids) + detokenizer.end()
    assert joined == _decode(_BYTES)(ids)


class _Counted:
    """Decodes, and knows the most tokens that it was given at once."""

    longest = 0

    def __call__(self, ids: Any) -> str:
        self.longest = max(self.longest, len(ids))
        return str(_decode(_PIECES)(ids))


def test_garbage_is_let_go_and_costs_no_more_and_more() -> None:
    decode = _Counted()
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.add(1 + 0xFF) for _ in range(1000)]
    assert sum(map(len, pieces)) > 900
    assert decode.longest < 150


def test_a_run_of_spaces_costs_no_more_and_more() -> None:
    decode = _Counted()
    detokenizer = Detokenizer(decode)
    ids = [*_byte_ids(_PIECES, "é".encode()), *[260] * 500, 259]
    assert "".join(detokenizer.add(token) for token in ids) == "é" + " " * 500 + "x"
    assert decode.longest < 10


@pytest.mark.parametrize(("word", "text"), [([], "Rest"), ([257], " Rest"), ([260], " Rest"), ([0, 260, 0], " Rest")])
def test_tokens_without_text_cost_no_more_and_more(word: list[int], text: str) -> None:
    decode = _Counted()
    detokenizer = Detokenizer(decode)
    for token in word:
        detokenizer.add(token)
    assert "".join(detokenizer.add(0) for _ in range(1000)) == ""
    assert detokenizer.add(258) == text
    assert decode.longest < 10


def test_spaces_between_words_survive() -> None:
    detokenizer = Detokenizer(_decode(_PIECES))
    assert [detokenizer.add(token) for token in (257, 258, 259)] == ["der", " Rest", "x"]


@settings(deadline=None)  # the machine may be busy
@given(
    st.text(alphabet="abc", max_size=40),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3),
    st.data(),
)
def test_text_is_cut_at_the_first_stop_string_however_it_comes(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cutter = StopCutter(stops)
    out, at = "", 0
    while at < len(text):
        step = data.draw(st.integers(1, 6))
        out += cutter.add(text[at : at + step])
        at += step
    out += cutter.end()
    places = [text.find(stop) for stop in stops if stop in text]
    if places:
        # Text that comes in pieces can complete a long stop string after a shorter one that begins later.
        assert cutter.found
        assert not any(stop in out for stop in stops)
        assert text.startswith(out)
        assert len(out) >= min(places)
    else:
        assert out == text
        assert not cutter.found


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    cutter = StopCutter(["END", "\n\n"])
    assert cutter.add("one\n") == "one"
    assert cutter.add("two EN") == "\ntwo "
    assert cutter.add("Dless") == ""
    assert cutter.found
    assert cutter.add("more") == ""


@pytest.mark.parametrize("tokenizer", [_BYTES, _PIECES], ids=["bytes", "pieces"])
def test_bytes_of_tokens(tokenizer: Any) -> None:
    of = token_bytes(tokenizer)
    assert b"".join(of(token) for token in _byte_ids(tokenizer, "Grüße 🙂".encode())) == "Grüße 🙂".encode()


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
