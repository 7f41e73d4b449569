"""Requests with a draft: Transformers' own assisted decoding, without reuse, and the result says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import kvboost
from kvboost import KVBoost
from kvboost.hf.weights import streamed_weights_of
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

Tiny = Callable[..., Any]
_SETTINGS: dict[str, Any] = {"chunk_size": 16, "chunking": "fixed"}
_GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
_LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 10}
_TOKENIZER = byte_tokenizer()
_TEXT = "qrst" * 23  # repeats itself, so that looking it up finds something
_IDS = _TOKENIZER(_TEXT, return_tensors="pt").input_ids


@pytest.fixture
def model(tiny: Tiny) -> Any:
    return tiny("llama", vocab_size=260)


def _alone(model: Any, **arguments: Any) -> list[int]:
    """The new tokens of plain Transformers."""
    found = model.generate(_IDS, attention_mask=torch.ones_like(_IDS), tokenizer=_TOKENIZER, **arguments)
    new: list[int] = found[0, _IDS.shape[1] :].tolist()
    return new


@contextmanager
def _passes(model: Any) -> Iterator[list[int]]:
    """How many tokens each forward of the model reads."""
    read: list[int] = []
    hook = model.register_forward_hook(
        lambda module, args, kwargs, output: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield read
    finally:
        hook.remove()


@pytest.mark.parametrize("draft", ["lookup", "lookup and a stop string", "lookup, sampled", "model"])
def test_a_draft_gives_plain_transformers_tokens_without_reuse(
    draft: str, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    given, name = {**_GREEDY, **_LOOKUP}, "prompt_lookup_num_tokens"
    if draft == "model":
        given, name = {**_GREEDY, "assistant_model": tiny_model("llama", vocab_size=260)}, "assistant_model"
    elif "sampled" in draft:
        given |= {"do_sample": True, "top_k": 2}
    elif "stop" in draft:
        given |= {"stop_strings": [_TOKENIZER.decode(_alone(model, **_GREEDY)[6:7])]}

    def seeded(ask: Callable[[], Any]) -> Any:
        torch.manual_seed(0)
        return ask()

    with _passes(model) as read:
        wanted = seeded(lambda: _alone(model, **given))
    assert len(read) < len(wanted)  # the draft proposes something that is accepted
    assert (len(wanted) < 24) is ("stop" in draft)

    with KVBoost(model, _TOKENIZER, **_SETTINGS) as engine:
        engine.warm(_TEXT)
        with _passes(model) as ours:
            result = seeded(lambda: engine.generate(_TEXT, **given))
        assert list(result.token_ids) == wanted
        assert ours == read
        assert result.reuse.cached_tokens == 0
        assert f"with {name}, Transformers feeds the whole prompt again" in str(result.reuse.reason)
        pieces = seeded(lambda: list(engine.stream(_TEXT, **given)))
        assert [token for piece in pieces for token in piece.token_ids] == wanted
        assert "".join(piece.text for piece in pieces) == result.output_text

    with kvboost.attach(model, _TOKENIZER, **_SETTINGS) as attached, caplog.at_level(logging.INFO, "kvboost"):
        attached.engine.warm(_TEXT)
        assert seeded(lambda: _alone(model, **given)) == wanted
        assert attached.engine.cache_stats()["cache_hits"] == 0
    assert f"without reuse: with {name}" in caplog.text


def test_a_batch_with_a_draft_runs_one_by_one(model: Any) -> None:
    wanted = _alone(model, **_GREEDY, **_LOOKUP)
    with KVBoost(model, _TOKENIZER, **_SETTINGS) as engine:
        first, other = engine.generate_batch([_TEXT, _TEXT[:50]], **_GREEDY, **_LOOKUP)
    assert list(first.token_ids) == wanted
    for result in (first, other):
        assert "prompt_lookup_num_tokens" in str(result.reuse.reason)


def test_a_draft_that_the_models_own_generation_config_asks_for() -> None:
    model = tiny_model("llama", vocab_size=260)
    wanted = _alone(model, **_GREEDY)
    model.generation_config.prompt_lookup_num_tokens = 3
    drafted = _alone(model, **_GREEDY)
    with KVBoost(model, _TOKENIZER, **_SETTINGS) as engine:
        engine.warm(_TEXT)
        result = engine.generate(_TEXT, **_GREEDY)
        assert list(result.token_ids) == drafted
        assert "prompt_lookup_num_tokens" in str(result.reuse.reason)
        without = engine.generate(_TEXT, prompt_lookup_num_tokens=None, **_GREEDY)
        assert list(without.token_ids) == wanted
        assert without.reuse.cached_tokens > 80


def test_one_pass_over_streamed_weights_verifies_several_tokens(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 260}
    resident = tiny_model("llama", **shape)
    resident.save_pretrained(tmp_path)
    _TOKENIZER.save_pretrained(tmp_path)
    for draft in (_LOOKUP, {"assistant_model": tiny_model("llama", **shape)}):
        wanted = _alone(resident, **_GREEDY, **draft)
        with KVBoost.from_pretrained(str(tmp_path), weight_budget="500kB", **_SETTINGS) as engine:
            assert streamed_weights_of(engine.model) is not None
            with _passes(engine.model) as read:
                result = engine.generate(_TEXT, **_GREEDY, **draft)
            assert list(result.token_ids) == wanted
            assert len(read) < len(wanted)
