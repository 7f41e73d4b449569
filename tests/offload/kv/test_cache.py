from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache

from kvboost.direct_io import PAGE, up_to_page
from kvboost.errors import CapacityError, ConfigError, UnsupportedModelError
from kvboost.hf.cache import KVLayout
from kvboost.hf.probe import probe_model
from kvboost.offload.kv.cache import PagedCache, _resident_pages, probe_paging
from kvboost.offload.kv.pager import TRANSIT, PagingLedger
from tests.helpers.models import FAMILIES, tiny_model

Tiny = Callable[..., Any]
_TEXT = torch.randint(3, 97, (1, 400), generator=torch.Generator().manual_seed(3))
_EAGER = {"gemma2"}  # soft-capped attention does not go through torch's kernel
_GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
_MODELS: dict[str, tuple[Any, KVLayout]] = {}


def known(family: str) -> tuple[Any, KVLayout]:
    if family not in _MODELS:
        model = tiny_model(family)
        _MODELS[family] = model, probe_model(model).layout
    return _MODELS[family]


def budget_of(layout: KVLayout, block_tokens: int, *, spare: int) -> int:
    """What is always needed, and ``spare`` more pages."""
    page = up_to_page(block_tokens * max(2 * spec.bytes_per_row for spec in layout.slots))
    return page * (len(layout.slots) // 2 + TRANSIT + spare)


def steps(total: int, sizes: list[int]) -> list[tuple[int, int]]:
    """Cuts ``[0, total)`` into steps of these sizes, then single tokens."""
    cuts, at = [], 0
    for size in sizes:
        if at + size <= total:
            cuts.append((at, at + size))
            at += size
    return [*cuts, *((i, i + 1) for i in range(at, total))]


@torch.no_grad()
def logits(model: Any, cache: Any, cuts: list[tuple[int, int]], ids: torch.Tensor = _TEXT) -> torch.Tensor:
    parts = [model(input_ids=ids[:, a:b], past_key_values=cache).logits[0] for a, b in cuts]
    return torch.cat(parts)


def held(cache: PagedCache, layer: int) -> list[torch.Tensor]:
    """A layer's keys and values, [1, heads, tokens, dim] each."""
    return cache._by_slot(cache.span(0, cache.get_seq_length()))[2 * layer : 2 * layer + 2]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - _EAGER))
def test_logits_and_greedy_tokens_are_those_of_the_unpaged_model(family: str, tmp_path: Path) -> None:
    model, layout = known(family)
    cuts = steps(150, [50, 7, 60])
    budget = budget_of(layout, 8, spare=3)
    with PagedCache(model, kv_bytes=budget, block_tokens=8, directory=tmp_path, layout=layout) as cache:
        found = logits(model, cache, cuts)
        assert cache.ledger.peak <= budget
        assert cache.ledger.read_bytes > 0
        assert list(tmp_path.iterdir()) == []
    assert_close(found, logits(model, DynamicCache(), cuts))
    prompt = {"input_ids": _TEXT[:, :100], "attention_mask": torch.ones(1, 100, dtype=torch.long)}
    with PagedCache(model, kv_bytes=budget, block_tokens=8, layout=layout) as cache:
        logits(model, cache, [(0, 33), (33, 66), (66, 99)])
        answer = model.generate(**prompt, past_key_values=cache, max_new_tokens=64, **_GREEDY)
    assert torch.equal(answer, model.generate(**prompt, max_new_tokens=64, **_GREEDY))


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_blocks_budgets_and_steps(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(["llama", "gemma3_text", "gpt2"]))
    model, layout = known(family)
    block = data.draw(st.integers(1, 40))
    budget = budget_of(layout, block, spare=data.draw(st.integers(0, 12)))
    total = data.draw(st.integers(2, 70))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=5))
    cuts = steps(total, sizes)
    stock = DynamicCache()  # without a config every layer keeps all tokens
    with PagedCache(model, kv_bytes=budget, block_tokens=block, layout=layout) as cache:
        assert_close(logits(model, cache, cuts), logits(model, stock, cuts))
        for layer, other in enumerate(stock.layers):
            for mine, theirs in zip(held(cache, layer), (other.keys, other.values), strict=True):
                assert_close(mine, theirs)
        assert cache.get_seq_length() == total
        assert 0 < cache.ledger.used <= cache.ledger.peak <= budget


@given(block=st.integers(1, 24), spare=st.integers(0, 6), sizes=st.lists(st.integers(1, 70), max_size=5))
@settings(max_examples=30, deadline=None)
def test_tokens_come_back_as_the_same_bits(block: int, spare: int, sizes: list[int]) -> None:
    model, layout = known("llama")
    budget = budget_of(layout, block, spare=spare)
    random = torch.Generator().manual_seed(block)
    with PagedCache(model, kv_bytes=budget, block_tokens=block, layout=layout) as cache:
        given: list[list[torch.Tensor]] = [[torch.empty(1, 2, 0, 8)] * 2 for _ in cache.layers]
        for size in sizes:
            for number, layer in enumerate(cache.layers):
                # Any bits: NaNs and infinities too.
                new = [torch.randint(-(2**31), 2**31, (1, 2, size, 8), generator=random).int() for _ in range(2)]
                layer.append(*(states.view(torch.float32) for states in new))
                given[number] = [
                    torch.cat([old, states.view(torch.float32)], 2)
                    for old, states in zip(given[number], new, strict=True)
                ]
        for number, written in enumerate(given):
            for mine, expected in zip(held(cache, number), written, strict=True):
                assert torch.equal(mine.view(torch.int32), expected.contiguous().view(torch.int32))
        assert cache.ledger.peak <= budget


def test_a_context_of_many_times_the_budget() -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    layout = probe_model(model).layout
    ids = torch.randint(3, 97, (1, 3000), generator=torch.Generator().manual_seed(1))
    budget = budget_of(layout, 32, spare=1)
    assert layout.bytes_per_token * 3000 > 30 * budget
    cuts = steps(3000, [500] * 5 + [495])
    with PagedCache(model, kv_bytes=budget, block_tokens=32, layout=layout) as cache:
        found = logits(model, cache, cuts, ids)
        ledger = cache.ledger
    assert_close(found, logits(model, DynamicCache(), cuts, ids))
    assert ledger.peak <= budget


def test_a_budget_for_everything_moves_nothing() -> None:
    model, layout = known("llama")
    with PagedCache(model, kv_bytes=10**6, block_tokens=16, layout=layout) as cache:
        found = logits(model, cache, steps(120, [40, 40]))
        assert (cache.ledger.written_bytes, cache.ledger.read_bytes) == (0, 0)
    assert_close(found, logits(model, DynamicCache(), steps(120, [40, 40])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_as_near_as_unpaged(dtype: torch.dtype) -> None:
    model, exact = tiny_model("llama", dtype=dtype), tiny_model("llama")
    exact.load_state_dict(model.state_dict())
    layout = probe_paging(model)
    cuts = steps(90, [40, 40])
    with PagedCache(model, kv_bytes=budget_of(layout, 8, spare=0), block_tokens=8, layout=layout) as cache:
        paged = logits(model, cache, cuts).float()
    best, unpaged = logits(exact, DynamicCache(), cuts), logits(model, DynamicCache(), cuts).float()
    assert (paged - best).abs().mean() <= 1.2 * (unpaged - best).abs().mean()


def test_a_window_reads_only_what_it_sees() -> None:
    model, layout = known("gemma3_text")
    full, _ = known("llama")
    moved: list[PagingLedger] = []
    for of in (model, full):
        budget = budget_of(layout, 8, spare=0)
        with PagedCache(of, kv_bytes=budget, block_tokens=8, layout=layout) as cache:
            logits(of, cache, steps(200, [100, 90]))
            moved.append(cache.ledger)
    assert moved[0].read_bytes < 0.75 * moved[1].read_bytes  # one layer of two has a window of 16


@given(left=st.integers(0, 60), windows=st.lists(st.sampled_from([None, 5, 16, 64]), min_size=1, max_size=8))
def test_resident_pages_are_spread_evenly(left: int, windows: list[int | None]) -> None:
    quotas = _resident_pages(left, windows, 8)
    assert sum(quotas) <= left
    whole = [quota for quota, window in zip(quotas, windows, strict=True) if window is None]
    assert not whole or max(whole) - min(whole) <= 1
    assert not whole or sum(quotas) == left


@pytest.mark.parametrize("where", ["spill", "model"])
def test_nothing_stays_after_an_exception(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout = known("llama")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    def run() -> None:
        budget = budget_of(layout, 4, spare=0)
        with PagedCache(model, kv_bytes=budget, block_tokens=4, directory=tmp_path, layout=layout) as cache:
            logits(model, cache, steps(40, [20]))
            if where == "model":
                raise RuntimeError("stopped")
            monkeypatch.setattr(os, "pwritev", full)
            logits(model, cache, steps(40, [20]))

    with pytest.raises(OSError if where == "spill" else RuntimeError, match="No space|stopped"):
        run()
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
    with torch.no_grad():  # and attention is torch's own again
        assert_close(logits(model, DynamicCache(), [(0, 9)]), model(input_ids=_TEXT[:, :9]).logits[0])


class TestRefusals:
    def test_attention_that_does_not_go_through_the_kernel(self) -> None:
        with pytest.raises(UnsupportedModelError, match="without kv_bytes"):
            probe_paging(tiny_model("gemma2", attn_implementation="eager"))

    def test_a_single_layer_that_does_not(self) -> None:
        model = tiny_model("llama", num_hidden_layers=1)
        model.set_attn_implementation("eager")
        with pytest.raises(UnsupportedModelError, match="not Transformers' 'sdpa'"):
            probe_paging(model)

    def test_padding(self) -> None:
        model, layout = known("llama")
        mask = torch.ones(1, 9, dtype=torch.long)
        mask[0, :3] = 0
        with (
            PagedCache(model, kv_bytes=10**6, block_tokens=64, layout=layout) as cache,
            torch.no_grad(),
            pytest.raises(UnsupportedModelError, match="padding"),
        ):
            model(input_ids=_TEXT[:, :9], attention_mask=mask, past_key_values=cache)

    def test_a_batch(self) -> None:
        model, layout = known("llama")
        with (
            PagedCache(model, kv_bytes=10**6, block_tokens=64, layout=layout) as cache,
            torch.no_grad(),
            pytest.raises(ConfigError, match="one sequence"),
        ):
            model(input_ids=_TEXT[:, :10].view(2, 5), past_key_values=cache)

    @pytest.mark.parametrize(
        "argument",
        [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 2}],
    )
    def test_beams_samples_and_drafts(self, argument: dict[str, Any]) -> None:
        model, layout = known("llama")
        prompt = {"input_ids": _TEXT[:, :20], "attention_mask": torch.ones(1, 20, dtype=torch.long)}
        with (
            PagedCache(model, kv_bytes=10**6, block_tokens=64, layout=layout) as cache,
            pytest.raises(ConfigError, match="one sequence|takes no tokens back"),
        ):
            model.generate(**prompt, past_key_values=cache, max_new_tokens=8, **(_GREEDY | argument))

    def test_gradients(self) -> None:
        model, layout = known("llama")
        with (
            PagedCache(model, kv_bytes=10**6, block_tokens=64, layout=layout) as cache,
            pytest.raises(ConfigError, match="no_grad"),
        ):
            model(input_ids=_TEXT[:, :5], past_key_values=cache)

    def test_use_outside_its_block(self) -> None:
        model, layout = known("llama")
        cache = PagedCache(model, kv_bytes=10**6, block_tokens=64, layout=layout)
        with torch.no_grad(), pytest.raises(ConfigError, match="with PagedCache"):
            model(input_ids=_TEXT[:, :5], past_key_values=cache)
        with cache:
            pass
        with pytest.raises(ConfigError, match="closed"), cache:
            pass

    def test_a_budget_too_small(self) -> None:
        model, layout = known("llama")
        with pytest.raises(CapacityError, match=rf"take {4 * PAGE} bytes; raise it, or lower block_tokens"):
            PagedCache(model, kv_bytes=4 * PAGE - 1, block_tokens=8, layout=layout)
