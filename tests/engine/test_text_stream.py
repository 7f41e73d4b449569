from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.generation import utils as generation_utils

from kvboost import ConfigError, KVBoost, StreamPiece
from kvboost.engine.text_stream import Detokenizer, PieceStreamer
from kvboost.serve.generation.token_stream import token_bytes
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer, pieces_tokenizer

_TOKENIZER = byte_tokenizer()


_PIECES = pieces_tokenizer()
_ID_OF = {byte: token for token in range(3, 259) for byte in token_bytes(_TOKENIZER)(token)}


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
    tokenizer = _TOKENIZER if kind == "bytes" else _PIECES
    text = text.lstrip(" ") if kind == "pieces" else text  # that decoder drops a leading space
    detokenizer = Detokenizer(_decode(tokenizer))
    pieces = [detokenizer.add(token) for token in _byte_ids(tokenizer, text.encode())]
    assert "".join(pieces) == text, "nothing of a whole text is held back"
    assert detokenizer.end() == ""


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(0, 258), max_size=300))
def test_any_bytes_give_the_text_of_all_tokens(ids: list[int]) -> None:
    detokenizer = Detokenizer(_decode(_TOKENIZER))
    joined = "".join(detokenizer.add(token) for token in ids) + detokenizer.end()
    assert joined == _decode(_TOKENIZER)(ids)


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


@pytest.fixture(scope="module")
def engine() -> KVBoost:
    return _engine()


def _engine() -> KVBoost:
    return KVBoost(tiny_model("llama", vocab_size=260), _TOKENIZER, chunk_size=16)


@given(st.text(max_size=40))
def test_pieces_join_to_the_text_and_break_no_character(text: str) -> None:
    pieces: list[StreamPiece] = []
    streamer = PieceStreamer(lambda ids: _TOKENIZER.decode(ids, skip_special_tokens=True), pieces.append)
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    ids = _TOKENIZER(text)["input_ids"]
    for token in ids:  # one byte each
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(p.text for p in pieces) == text
    assert [t for p in pieces for t in p.token_ids] == ids
    if "�" not in text:
        assert not any("�" in p.text for p in pieces)


def test_special_tokens_cost_no_more_and_more() -> None:
    pieces: list[StreamPiece] = []
    longest = 0

    def decode(ids: Any) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return str(_TOKENIZER.decode(ids, skip_special_tokens=True))

    streamer = PieceStreamer(decode, pieces.append)
    streamer.put(torch.tensor([[1]]))  # the prompt
    for token in [_TOKENIZER.eos_token_id] * 500 + _TOKENIZER("a")["input_ids"]:
        streamer.put(torch.tensor([token]))
    assert (pieces[-1].text, len(pieces)) == ("a", 501)
    assert longest < 10


def test_stream_gives_what_generate_gives(engine: KVBoost) -> None:
    whole = engine.generate("Once upon a time", max_new_tokens=12, temperature=0)
    pieces = list(engine.stream("Once upon a time", max_new_tokens=12, temperature=0))
    assert "".join(p.text for p in pieces) == whole.output_text
    assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
    assert all(p.result is None for p in pieces[:-1])
    result = pieces[-1].result
    assert result is not None
    assert result.token_ids == whole.token_ids


def test_closing_the_stream_stops_the_generation(engine: KVBoost) -> None:
    before = threading.active_count()
    started = engine.stream("Once upon a time", max_new_tokens=400, temperature=0, eos_token_id=None)
    del started  # dropped unread: cancelled all the same
    stream: Any = engine.stream("Once upon a time", max_new_tokens=400, temperature=0, eos_token_id=None)
    next(stream)
    stream.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert engine._store.stats().leased == 0


def test_errors_reach_the_caller(engine: KVBoost) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        engine.stream("text", max_new_tokens=0)
    with pytest.raises(ConfigError, match="is the streamer"):
        engine.stream("text", streamer=object())
    with pytest.raises(ConfigError, match="may change the prompt's KV"):
        list(engine.stream("text", max_new_tokens=2, no_such_argument=1))


def test_closing_during_the_prompt_stops_between_steps(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    append = engine.parts.runner.append
    monkeypatch.setattr(
        engine.parts.runner,
        "append",
        lambda t, *a, **k: (steps.append(len(t)), time.sleep(0.05), append(t, *a, **k))[2],
    )
    stream = engine.stream("A prompt of many steps. " * 20, max_new_tokens=2, temperature=0)
    stream.close()
    assert len(steps) < 20
    assert engine._store.stats().leased == 0


def test_the_first_token_of_a_stream_is_the_first_piece(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token whose text is not there yet cannot be used: half a character, or a slow tokenizer."""
    decode = engine.parts.encoder.decode
    monkeypatch.setattr(engine.parts.encoder, "decode", lambda ids: (time.sleep(0.2), decode(ids))[1])
    result = list(engine.stream("Once upon a time", max_new_tokens=2, temperature=0))[-1].result
    assert result is not None
    assert result.ttft_ms > 200


def test_the_clock_of_a_stream_starts_with_the_call(engine: KVBoost) -> None:
    stream = engine.stream("Once upon a time", max_new_tokens=3, temperature=0)
    time.sleep(1.0)  # a slow consumer does not make the first token later
    result = list(stream)[-1].result
    assert result is not None
    assert result.ttft_ms < 900


class _Looking:
    """A streamer that notes what is stored at each of its tokens."""

    def __init__(self, engine: KVBoost) -> None:
        self._engine = engine
        self.stored: list[int] = []

    def put(self, value: Any) -> None:
        self.stored.append(self._engine.cache_stats()["hot_chunks"])

    def end(self) -> None:
        pass


def test_nothing_is_stored_before_the_first_token_is_handed_over() -> None:
    """Storing copies KV: whoever streams would wait for it."""
    engine = _engine()
    looking = _Looking(engine)
    engine.generate("Once upon a time " * 12, max_new_tokens=3, temperature=0, streamer=looking)
    prompt, first, second, _ = looking.stored
    assert prompt == first == 0
    assert second > 0


@pytest.mark.skipif(not hasattr(generation_utils, "DeferredStopCheck"), reason="Transformers stops at once")
def test_a_token_that_is_handed_over_one_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Transformers does on mps: it runs one step too many, takes it back, and streams behind."""
    prompt: dict[str, Any] = {"prompt": "Once upon a time " * 12, "max_new_tokens": 12, "temperature": 0}
    engine = _engine()
    wanted = [list(engine.stream(**prompt)) for _ in range(2)]
    engine = _engine()
    monkeypatch.setattr(generation_utils.DeferredStopCheck, "is_supported", staticmethod(lambda *_, **__: True))
    monkeypatch.setattr(torch, "Event", lambda **_: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    for before in wanted:
        after = list(engine.stream(**prompt))
        assert [piece.token_ids for piece in after] == [piece.token_ids for piece in before]
        assert after[-1].result is not None
        assert before[-1].result is not None
        assert after[-1].result.reuse.exact_tokens == before[-1].result.reuse.exact_tokens
