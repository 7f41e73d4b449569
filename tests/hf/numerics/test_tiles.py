"""A prefill in tiles has the same bits however it is cut into steps, and what cannot run so is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from kvboost import KVBoost
from kvboost.core.verify import same_bits
from kvboost.hf import attention
from kvboost.hf.cache import SlabCache
from kvboost.hf.numerics import choose as choose_module
from kvboost.hf.numerics import choose_numerics
from kvboost.hf.numerics import tiles as tiles_module
from kvboost.hf.numerics.rows import PackedLinear, can_pack, run_rows
from kvboost.hf.numerics.tiles import Tiles, why_no_tiles
from kvboost.hf.probe import probe_model
from kvboost.hf.shape import shape_of
from kvboost.steps import StepRule
from tests.helpers.kernels import round_by_rows
from tests.helpers.models import tiny_model
from tests.helpers.mutations import mutated
from tests.helpers.packing import pack_all

_WIDE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 1024}
_TOKENS = 640  # beyond a block of 512 keys
_IDS = (torch.arange(_TOKENS) * 7919 % 97).view(1, -1)
_MODELS: dict[Any, Any] = {}


def made_tiles(model: Any) -> tuple[Any, Any, Tiles]:
    layout = probe_model(model).layout
    chosen = choose_numerics(model, layout, shape_of(model, layout), numerics=None)
    assert chosen.tiles is not None, chosen.reason
    return model, layout, chosen.tiles


def tiled(family: str, dtype: torch.dtype) -> tuple[Any, Any, Tiles]:
    if (family, dtype) not in _MODELS:
        _MODELS[family, dtype] = made_tiles(tiny_model(family, dtype=dtype, **_WIDE))
    return _MODELS[family, dtype]


@torch.no_grad()
def prefill(model: Any, layout: Any, tiles: Tiles, ends: list[int]) -> tuple[torch.Tensor, ...]:
    cache = SlabCache(layout, capacity=_TOKENS)
    for slab in cache.slabs:
        slab.fill_(torch.nan)  # what an earlier request left must not leak through padding
    start = 0
    for end in ends:
        with tiles.step(cache, end - start):
            model.get_decoder()(input_ids=_IDS[:, start:end], past_key_values=cache, use_cache=True)
        start = end
    return cache.extract(0, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "qwen2"])
@given(cuts=st.sets(st.integers(1, _TOKENS - 1), max_size=4), end=st.integers(1, _TOKENS))
@settings(max_examples=15, deadline=None)
def test_any_cuts_give_the_same_bits(family: str, dtype: torch.dtype, cuts: set[int], end: int) -> None:
    model, layout, tiles = tiled(family, dtype)
    whole = prefill(model, layout, tiles, [_TOKENS])
    parts = prefill(model, layout, tiles, [*sorted(cut for cut in cuts if cut < end), end])
    for one, other in zip(whole, parts, strict=True):
        assert same_bits(one[:, :, :end], other)


def differs(of: tuple[Any, Any, Tiles], cuts: list[int]) -> bool:
    whole, parts = (prefill(*of, [*cut, _TOKENS]) for cut in ([], cuts))
    return not all(same_bits(one, other) for one, other in zip(whole, parts, strict=True))


_CUTS = [270, 300, 333, 601]


@pytest.mark.parametrize("bug", ["no granule", "keys not wiped", "mask dropped", "mask off by one", "any rows"])
def test_seeded_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: each of these makes bits depend on the step."""
    of = tiled("llama", torch.float32)
    assert not differs(of, _CUTS)
    if bug == "no granule":
        monkeypatch.setattr(of[2], "granule", 1)
    elif bug == "keys not wiped":
        monkeypatch.setattr(SlabCache, "wipe", lambda *_: None)
    elif bug == "mask dropped":
        nothing_hidden = torch.zeros(1, 1, 1, 1)
        monkeypatch.setattr(attention, "_bias", lambda *_: nothing_hidden)
    elif bug == "mask off by one":
        wrong = mutated(attention._after_prefix, "first + blocks\n", "first + blocks + 1\n")
        monkeypatch.setattr(attention, "_after_prefix", wrong)
    else:
        round_by_rows(monkeypatch)
        monkeypatch.setattr(tiles_module._Layer, "runs_as_it_is", lambda *_: True)
    assert differs(of, _CUTS)


def test_kernels_that_round_by_their_rows_are_given_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    round_by_rows(monkeypatch)
    monkeypatch.setattr(tiles_module, "_GOOD_ENOUGH", 2.0)  # or packed weights take their place
    of = made_tiles(tiny_model("llama", **_WIDE))
    assert not differs(of, [1, 20, *_CUTS])
    cuts = [1, 20, 421]
    assert any(len(layer.sizes.cover(401)) > 1 for layer in of[2]._plan().layers)
    assert not differs(of, cuts)
    # A call that begins one row early puts each row behind its border into the place of the next.
    wrong = mutated(run_rows, "x[start : start + size]", "x[max(start - 1, 0) :][:size]")
    monkeypatch.setattr(tiles_module, "run_rows", wrong)
    assert differs(of, cuts)


def test_what_is_packed_stays_packed_whatever_a_later_plan_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for another number of threads, with other memory free: the key names what was packed at first."""
    for first, later in ((0.0, 2.0), (2.0, 0.0)):
        monkeypatch.setattr(tiles_module, "_GOOD_ENOUGH", first)
        _, _, tiles = made_tiles(tiny_model("llama", **_WIDE))
        packed, spec = tiles.packed_bytes, tiles.spec
        assert (":packed" in spec) == (packed > 0)
        monkeypatch.setattr(tiles_module, "_GOOD_ENOUGH", later)
        tiles.weights_changed()
        tiles._plan()
        assert tiles.packed_bytes == packed


def test_packed_and_unpacked_weights_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is packed is packed for every step, also for one whose rows its own kernel could take."""
    packed = PackedLinear.__call__
    monkeypatch.setattr(tiles_module, "_GOOD_ENOUGH", 0.0)  # pack whatever can be packed
    # Other bits than the plain layer on any machine, by the same rule for every row.
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: packed(self, x) * (1 + 2**-20))
    of = made_tiles(tiny_model("llama", **_WIDE))
    if not of[2].packed_bytes:
        pytest.skip("no layer is better packed on this machine")
    cuts = [1, 20, *_CUTS]
    assert not differs(of, cuts)
    monkeypatch.setattr(tiles_module._Layer, "runs_as_it_is", lambda self, rows: 20 < rows < 64)
    assert differs(of, cuts)


def test_outside_a_step_the_attention_is_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = tiled("llama", torch.float32)
    with torch.no_grad():
        assert AttentionInterface().get("sdpa") is attention.attention
        ours = model(input_ids=_IDS).logits
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", sdpa_mask)
        stock = model(input_ids=_IDS).logits
    assert same_bits(ours, stock)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("qwen3_5_text", {}, "recurrent layer"),
        ("llama", {"attn_implementation": "eager"}, "eager"),
        ("gemma2", {}, "eager|softcap"),  # by the version of Transformers
    ],
)
def test_what_cannot_run_in_tiles_is_stepped_on_a_grid(family: str, changes: dict[str, Any], why: str) -> None:
    model = tiny_model(family)
    if "attn_implementation" in changes:
        model.set_attn_implementation(changes["attn_implementation"])
    before = model.config._attn_implementation
    layout = probe_model(model).layout
    chosen = choose_numerics(model, layout, shape_of(model, layout), numerics=None)
    assert chosen.tiles is None
    assert chosen.rule == StepRule(128, 128)
    assert re.search(why, chosen.reason or "")
    assert model.config._attn_implementation == before


class _InBuffers(torch.nn.Module):
    """As GPTQ's and AWQ's layers keep their weights."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.register_buffer("numbers", (layer.weight.detach() * 100).to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.numbers.to(x.dtype).T


def _replace_forward(layer: torch.nn.Linear) -> None:
    layer.forward = lambda x: torch.nn.functional.linear(x.round(decimals=2), layer.weight)


def _pack(layer: torch.nn.Linear) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda layer: _InBuffers(layer), "_InBuffers multiplies with weights in its own way"),
        (_replace_forward, "the forward of Linear was replaced"),
        (_pack, "the weights of Linear are packed"),
    ],
)
def test_layers_whose_rounding_cannot_be_tested_are_not_run_in_tiles(change: Any, why: str) -> None:
    model = tiny_model("llama")
    layers = model.model.layers[1].self_attn
    assert why_no_tiles(model) is None
    layers.k_proj = change(layers.k_proj) or layers.k_proj
    assert why_no_tiles(model) == why
    assert not can_pack(layers.k_proj)


@pytest.mark.parametrize(
    ("family", "numerics", "masked"),
    [
        ("llama", None, "none"),
        ("gemma3_text", None, "all"),
        ("llama", "fast", "later"),
        ("gemma3_text", "fast", "all"),
        ("qwen3_moe", None, "none"),
    ],
)
def test_steps_with_a_mask_are_known(family: str, numerics: Any, masked: str) -> None:
    """Of a grid the rule need not know: it has the same steps with masks and without."""
    model = tiny_model(family)
    layout = probe_model(model).layout
    chosen = choose_numerics(model, layout, shape_of(model, layout), numerics=numerics)
    assert chosen.rule.masked == masked
    made: list[bool] = []
    if chosen.tiles is not None:
        cache = SlabCache(layout, capacity=200)
        for end in (80, 160):
            with chosen.tiles.step(cache, 80) as step, torch.no_grad():
                model.get_decoder()(input_ids=_IDS[:, end - 80 : end], past_key_values=cache, use_cache=True)
            made.append(bool(step.biases))
        assert made == [masked == "all"] * 2


def test_a_changed_weight_is_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_module, "_GOOD_ENOUGH", 0.0)  # pack whatever can be packed
    model = tiny_model("llama", **_WIDE)
    layout = probe_model(model).layout
    chosen = choose_numerics(model, layout, shape_of(model, layout), numerics=None)
    assert chosen.tiles is not None
    if not chosen.tiles.packed_bytes:
        pytest.skip("no layer is better packed on this machine")
    before = prefill(model, layout, chosen.tiles, [40])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(1.5)
    after = prefill(model, layout, chosen.tiles, [40])
    fresh = prefill(model, layout, Tiles(model, layout, granule=chosen.tiles.granule, budget=2**30), [40])
    assert not same_bits(before[0], after[0])
    assert all(same_bits(one, other) for one, other in zip(after, fresh, strict=True))


def test_weights_written_without_a_trace_are_packed_again_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes through ``.data`` leave a tensor's version alone; ``weights_changed`` is how a user says so."""
    pack_all(monkeypatch)
    model = tiny_model("llama", **_WIDE)
    with KVBoost(model, chunk_size=16) as engine:
        tiles = engine.parts.runner.tiles
        assert tiles is not None
        assert tiles.packed_bytes
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data.mul_(1.5)
        engine.weights_changed()
        found = engine.prefill(_IDS[0, :40].tolist()).logits
    with torch.no_grad():
        plain = model(input_ids=_IDS[:, :40]).logits[0, -1]
    assert (found - plain).abs().max() <= 1e-4 * plain.abs().max()


def test_weights_made_in_inference_mode_are_packed_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_all(monkeypatch)
    with torch.inference_mode():
        model = tiny_model("llama", **_WIDE)
    with KVBoost(model, chunk_size=16) as engine:
        tiles = engine.parts.runner.tiles
        assert tiles is not None
        assert tiles.packed_bytes


def test_a_check_that_fails_in_any_way_leaves_a_model_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")

    def fails(*_: Any) -> None:
        raise IndexError("a layer without a cache")

    monkeypatch.setattr(attention, "flash", fails)
    monkeypatch.setattr(choose_module, "key_granule", lambda _: 32)
    layout = probe_model(model).layout
    chosen = choose_numerics(model, layout, shape_of(model, layout), numerics=None)
    assert "IndexError: a layer without a cache" in (chosen.reason or "")
    assert model.config._attn_implementation == "sdpa"


def test_tiles_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits in any steps are not enough: here each step ignores the scale of its queries."""
    right = attention.flash
    monkeypatch.setattr(attention, "flash", lambda query, key, value, bias, scale: right(query, key, value, bias, 9.0))
    monkeypatch.setattr(choose_module, "key_granule", lambda _: 256)
    model = tiny_model("llama", **_WIDE)
    layout = probe_model(model).layout
    assert "something else" in (choose_numerics(model, layout, shape_of(model, layout), numerics=None).reason or "")


def test_flash_gets_no_dense_mask() -> None:
    """A stub of flash attention that fails where flash would end the process."""
    seen: list[int] = []

    def stub(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        seen.append(0 if attention_mask is None else attention_mask.dim())
        assert attention_mask is None or attention_mask.dim() <= 2
        past = key.shape[2] - query.shape[2]
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(past)
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        result = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return result.transpose(1, 2).contiguous(), None

    AttentionInterface.register("stub_no_masks", stub)
    AttentionMaskInterface.register("stub_no_masks", flash_attention_mask)
    model = tiny_model("llama")
    model.set_attn_implementation("stub_no_masks")
    with KVBoost(model, chunk_size=8, quality="fast", force_approx=True) as engine:
        text = torch.randint(3, 97, (200,), generator=torch.Generator().manual_seed(2)).tolist()
        engine.generate(text, max_new_tokens=2, temperature=0)
        again = engine.generate([5, 6, 7, *text], max_new_tokens=2, temperature=0)
        assert again.reuse.moved_tokens == 0
        assert "takes no mask of chosen positions" in (again.reuse.reason or "")
        assert engine.generate([*text, 9], max_new_tokens=2, temperature=0).reuse.exact_tokens == 128
    assert seen


def test_a_quarter_of_the_memory_beside_the_weights_may_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    weights = sum(tensor.nbytes for tensor in {id(one): one for one in model.parameters()}.values())
    for memory, allowed in ((weights + 4000, 1000), (weights - 4000, 0)):
        monkeypatch.setattr(choose_module, "memory_total", lambda memory=memory: memory)
        assert choose_module.budget_to_pack(model) == allowed
