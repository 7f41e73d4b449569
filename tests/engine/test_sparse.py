"""Models of sparse attention: the keys by which they choose positions are kept beside KV, and reused with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import CapacityError, KVBoost
from kvboost.hf.numerics import choose
from tests.helpers.exactness import assert_same_bits
from tests.helpers.models import SPARSE

Tiny = Callable[..., Any]
_GREEDY: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "eos_token_id": None}


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_GRID_ON_CPU", 16)


def text(seed: int, tokens: int) -> list[int]:
    return torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_for(model: Any, **settings: Any) -> KVBoost:
    return KVBoost(model, None, **{"chunk_size": 16, "quality": "exact", **settings})


@pytest.mark.parametrize("family", SPARSE)
def test_a_warm_run_has_the_bits_of_a_cold_one_where_fewer_positions_are_chosen_than_there_are(
    family: str, tiny: Tiny
) -> None:
    model, prompt = tiny(family), text(1, 90)
    with engine_for(model) as engine, engine_for(model) as cold:
        for tokens in (prompt, prompt + text(2, 20), prompt[:50] + text(3, 40)):
            assert_same_bits(engine.prefill(tokens), cold.prefill(tokens), len(tokens))
            cold.clear()
        assert engine.prefill(prompt).reuse.exact_tokens == 80
        answer, again = (one.generate(prompt, **_GREEDY) for one in (engine, cold))
        assert (answer.reuse.exact_tokens, again.reuse.exact_tokens) == (80, 0)
        assert answer.token_ids == again.token_ids
        assert engine.verify_correctness()


@pytest.mark.parametrize("family", SPARSE)
def test_the_answers_are_those_of_plain_transformers_where_all_positions_are_chosen(family: str, tiny: Tiny) -> None:
    model, prompt = tiny(family, index_topk=512), text(1, 90)
    plain = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    with engine_for(model) as engine:
        engine.warm(prompt[:60])
        answer = engine.generate(prompt, **_GREEDY)
        assert answer.reuse.exact_tokens
        assert list(answer.token_ids) == plain[0, len(prompt) :].tolist()
        beams = engine.generate(prompt, num_beams=3, **(_GREEDY | {"temperature": None}))
        wanted = model.generate(
            torch.tensor([prompt]), num_beams=3, max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        assert list(beams.token_ids) == wanted[0, len(prompt) :].tolist()
        first, second = engine.generate_batch([prompt, prompt[:70]], **_GREEDY)
        assert first.token_ids == answer.token_ids
        assert second.reuse.exact_tokens


@pytest.mark.parametrize("family", SPARSE)
def test_index_keys_are_those_of_transformers_own_cache(family: str, tiny: Tiny) -> None:
    """Of the first layer: what later ones read depends on what it chose."""
    model, prompt = tiny(family), text(1, 90)
    stock = model(torch.tensor([prompt]), use_cache=True).past_key_values.layers[0].indexer_keys
    with engine_for(model) as engine:
        for cache in (engine.prefill(prompt).cache, engine.prefill(prompt).cache):
            found = cache.layers[0].index_store[:, 0, : len(prompt)]
            assert torch.allclose(found, stock, rtol=1e-4, atol=1e-5)


def test_index_keys_come_back_from_disk(tiny: Tiny, tmp_path: Path) -> None:
    model, prompt = tiny("deepseek_v32"), text(1, 90)
    settings: dict[str, Any] = {"disk_cache_dir": tmp_path}
    with engine_for(model, **settings) as engine:
        before = engine.prefill(prompt)
        engine.flush()
    with engine_for(model, **settings) as engine:
        after = engine.prefill(prompt)
        assert after.reuse.exact_tokens == 80
        assert_same_bits(after, before, len(prompt))


def test_a_cache_that_grows_keeps_its_index_keys(tiny: Tiny) -> None:
    model, prompt = tiny("deepseek_v32", index_topk=512), text(1, 40)
    plain = model.generate(torch.tensor([prompt]), max_new_tokens=150, do_sample=False, eos_token_id=None)
    with engine_for(model) as engine:
        cache = engine.prefill(prompt).cache
        cache.crop(-1)
        grown = model.generate(
            torch.tensor([prompt]), past_key_values=cache, max_new_tokens=150, do_sample=False, eos_token_id=None
        )
    assert grown.tolist() == plain.tolist()


@pytest.mark.parametrize("family", SPARSE)
def test_steps_of_any_length_are_not_used(family: str, tiny: Tiny) -> None:
    """A forward of several tokens chooses other positions than one of each: more than rounding."""
    model, prompt = tiny(family), text(1, 90)
    with engine_for(model, numerics="fast") as engine, engine_for(model, numerics="fast") as cold:
        engine.warm(prompt[:50])
        assert_same_bits(engine.prefill(prompt), cold.prefill(prompt), len(prompt))


def test_what_is_not_possible_is_refused_with_the_reason(tiny: Tiny) -> None:
    model = tiny("deepseek_v32")
    with pytest.raises(CapacityError, match="index keys"):
        engine_for(model, kv_bytes=100_000).generate(text(1, 400), max_new_tokens=1)
    with engine_for(model, quality="fast") as engine:
        assert "sparse attention" in engine.describe()["non-prefix reuse"]
