"""Models without attention, whose states are all there is to reuse, and states beside sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.hf.numerics import choose
from kvboost.store import MemoryStore
from tests.helpers.exactness import assert_same_bits
from tests.helpers.models import NEWEST

Tiny = Callable[..., Any]
_GREEDY: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "eos_token_id": None}
pytestmark = pytest.mark.skipif(not NEWEST, reason="older versions keep these models' states in another way")
_BOTH = pytest.mark.parametrize("family", ["mamba2", "qwen4_exp_text"])


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_GRID_ON_CPU", 16)


def text(seed: int, tokens: int) -> list[int]:
    return torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_for(model: Any, **settings: Any) -> KVBoost:
    return KVBoost(model, None, **{"chunk_size": 16, "quality": "exact", **settings})


def plain(model: Any, prompt: list[int], **arguments: Any) -> list[int]:
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, **arguments}
    found: list[int] = model.generate(torch.tensor([prompt]), **greedy)[0, len(prompt) :].tolist()
    return found


def test_other_texts_of_one_length_are_told_apart(tiny: Tiny) -> None:
    model, one, other = tiny("mamba2"), text(1, 70), text(2, 70)
    with engine_for(model) as engine, engine_for(model) as cold:
        engine.warm(one)  # its cache is taken for the next prompt
        for tokens, known in ((other, 0), (other, 64), (one, 64), ([*one, 5, 6], 64), (one[:50] + other[:20], 0)):
            found = engine.prefill(tokens)
            assert found.reuse.exact_tokens == known
            assert_same_bits(found, cold.prefill(tokens), len(tokens))
            cold.clear()
            answer = engine.generate(tokens, **_GREEDY)
            assert list(answer.token_ids) == plain(model, tokens)


@_BOTH
def test_the_next_engine_goes_on_from_disk(family: str, tiny: Tiny, tmp_path: Path) -> None:
    model, prompt = tiny(family), text(1, 100)
    with engine_for(model, disk_cache_dir=tmp_path) as first:
        assert first.prefill(prompt).reuse.exact_tokens == 0
    with engine_for(model, disk_cache_dir=tmp_path) as second, engine_for(model) as cold:
        found = second.prefill(prompt)
        assert found.reuse.exact_tokens == 96
        assert_same_bits(found, cold.prefill(prompt), len(prompt))
        assert list(second.generate(prompt, **_GREEDY).token_ids) == plain(model, prompt)


@_BOTH
def test_batches_and_streams_give_the_answers_of_one_request(family: str, tiny: Tiny) -> None:
    model, prompts = tiny(family), [text(1, 90) + text(number, 5 + 30 * number) for number in range(3)]
    with engine_for(model) as engine:
        for known in (False, True):
            found = engine.generate_batch(prompts, **_GREEDY)
            assert [list(one.token_ids) for one in found] == [plain(model, prompt) for prompt in prompts]
            assert all(one.reuse.exact_tokens for one in found) or not known


def test_what_transformers_does_with_the_prompt_it_does_with_all_of_it(tiny: Tiny) -> None:
    """The first forward is cut to what the cache lacks; the prompt is not."""
    model, prompt = tiny("mamba2"), text(1, 70)
    with engine_for(model) as engine:
        engine.warm(prompt)
        for given in ({"repetition_penalty": 1.8}, {"no_repeat_ngram_size": 1}, {"num_beams": 3}):
            found = engine.generate(prompt, **{**_GREEDY, **given})
            assert found.reuse.exact_tokens == 64
            assert list(found.token_ids) == plain(model, prompt, **given)


def test_a_last_step_of_one_token_goes_on(tiny: Tiny) -> None:
    model, prompt = tiny("mamba2"), text(1, 65)
    with engine_for(model, reuse_generated=True) as engine:
        for known in (0, 64):
            answer = engine.generate(prompt, **_GREEDY)
            assert answer.reuse.exact_tokens == known
            assert list(answer.token_ids) == plain(model, prompt)
        longer = [*prompt, *answer.token_ids]
        assert engine.generate(longer, **_GREEDY).reuse.exact_tokens == 64
        assert engine.verify_correctness()


@pytest.mark.parametrize("bits", [8, 4])
def test_there_is_nothing_to_round(bits: int, tiny: Tiny) -> None:
    with engine_for(tiny("mamba2"), kv_cache_bits=bits) as engine:
        engine.warm(text(1, 70))
        found = engine.prefill(text(1, 70))
        assert (found.reuse.exact_tokens, found.reuse.bitwise) == (64, True)


def test_states_alone_fill_the_memory(tiny: Tiny) -> None:
    with engine_for(tiny("mamba2"), cache_bytes=200_000) as engine:
        store = engine.session.store
        assert isinstance(store, MemoryStore)
        for number in range(40):
            engine.warm(text(number, 70))
        assert store.state_bytes > 100_000
        assert store.stats().bytes <= 200_000
        assert engine.prefill(text(39, 70)).reuse.exact_tokens > 0


def test_memory_is_estimated_by_the_states(tiny: Tiny) -> None:
    with engine_for(tiny("mamba2")) as engine:
        layout = engine.parts.layout
        assert layout is not None
        assert layout.counts
        small, large = (engine.estimate_memory(context=100, batch=batch, stored_tokens=0) for batch in (1, 3))
        assert large.kv - small.kv == 2 * (100 * layout.bytes_per_token + layout.state_bytes)
        assert engine.describe()["recurrent state"].startswith(str(layout.state_bytes))


@torch.no_grad()
def test_indexed_attention_beside_states_is_resumed(tiny: Tiny) -> None:
    """Also where it chooses fewer positions than there are."""
    for budget in (512, 24):
        model, prompt = tiny("qwen4_exp_text", indexer_budget=budget), text(1, 90)
        with engine_for(model) as engine, engine_for(model) as cold:
            for known, tokens in ((0, prompt), (80, prompt), (80, prompt + text(2, 20))):
                found = engine.prefill(tokens)
                assert found.reuse.exact_tokens == known
                assert_same_bits(found, cold.prefill(tokens), len(tokens))
                cold.clear()
                torch.testing.assert_close(found.logits, model(torch.tensor([tokens])).logits[0, -1])
            for given in ({}, {"num_beams": 2}):
                answer = engine.generate(prompt, **_GREEDY, **given)
                assert answer.reuse.exact_tokens == 80
                assert list(answer.token_ids) == plain(model, prompt, **given)
