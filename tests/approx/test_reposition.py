from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache

from kvboost.approx.probe import probe_reposition
from kvboost.approx.reposition import KeyRepositioner, Move, _slices
from kvboost.hf.cache import KVLayout, SlabCache, layout_of
from tests.helpers.models import tiny_model

_LONG = 131_072
_THETA = {"rope_theta": 10_000.0}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_WIDE = {"hidden_size": 64}  # heads of 16, so that a rotated quarter still has two pairs to tell apart
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_YARN = {"rope_type": "yarn", "factor": 2048.0, "original_max_position_embeddings": 64, **_THETA}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    **_THETA,
}
_LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,  # scales the keys by 1.06
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 120_000,
    **_THETA,
}
# name: family and what differs from the tiny model of that family.
_MOVABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **_THETA}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **_THETA}}),
    "yarn": ("llama", {"rope_parameters": _YARN}),
    "longrope": ("llama", {"rope_parameters": _LONGROPE}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "qk-norm": ("qwen3", {}),
    "interleaved": ("cohere", {}),
    "partial, interleaved": ("glm", {"head_dim": 16}),
    "partial, phi": ("phi", _WIDE),
    "partial, stablelm": ("stablelm", _WIDE),
    "partial, neox": ("gpt_neox", _WIDE),
    "proportional and by layer type": ("gemma4_text", {**_BOTH, "head_dim": 8, "global_head_dim": 16}),
    "by layer type, gemma3": ("gemma3_text", {}),
    "by layer type, olmo3": (
        "olmo3",
        {
            **_BOTH,
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", **_THETA}},
        },
    ),
    "layers without, smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 0, 1, 0]}),
    "layers without, cohere2": ("cohere2", _BOTH),
    "layers without, llama4": (
        "llama4_text",
        {
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 0],
            "head_dim": 8,
            "intermediate_size_mlp": 48,
        },
    ),
    "half-width cosine and scaled": ("gpt_oss", {**_BOTH, "head_dim": 8, "num_local_experts": 4}),
    "latent, deepseek_v3": ("deepseek_v3", _MLA),
    "latent, deepseek_v2": ("deepseek_v2", _MLA),
}
_TOKENS = 40


def _build(tiny: Callable[..., Any], name: str, **more: Any) -> Any:
    family, overrides = _MOVABLE[name]
    return tiny(family, **{"max_position_embeddings": _LONG, **overrides, **more})


def _layout(model: Any) -> KVLayout:
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.arange(3, 9).view(1, -1), past_key_values=cache, use_cache=True)
    return layout_of(cache)


def _fresh(model: Any, start: int, tokens: int = _TOKENS) -> tuple[torch.Tensor, ...]:
    """The model's own KV of some tokens from position ``start`` on, as a block.

    Every token is read alone. Read together at 100,000, rounded angles make the attention itself differ from
    that at 0 (layer 1 of the tiny Llama by 8e-5): other hidden states, which is not what is tested here.
    """
    ids, positions = 1 + torch.arange(tokens) * 13 % 96, torch.arange(start, start + tokens)
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=ids.view(-1, 1), position_ids=positions.view(-1, 1), past_key_values=cache, use_cache=True)
    slots = [tensor[:, :, 0].transpose(0, 1) for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return tuple(torch.stack([slots[slot] for slot in group]) for group in layout_of(cache).groups.values())


def _repositioned(
    repositioner: KeyRepositioner, layout: KVLayout, block: Sequence[torch.Tensor], old: int, new: int
) -> tuple[torch.Tensor, ...]:
    end = new + block[0].shape[2]
    cache = SlabCache(layout, capacity=end)
    repositioner.place(cache, [Move(block, old, new)])
    return cache.span(new, end)


def _error(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """The worst slot's largest difference, relative to that slot's largest entry."""
    pairs = [pair for slabs in zip(found, right, strict=True) for pair in zip(*slabs, strict=True)]
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", _MOVABLE)
def test_moved_equals_fresh(name: str, tiny: Callable[..., Any]) -> None:
    model = _build(tiny, name)
    layout = _layout(model)
    repositioner = probe_reposition(model, layout)
    for old, new in ((0, 37), (512, 3), (0, 100_000), (100_000, 5), (99_000, 100_000)):
        stored, fresh = _fresh(model, old), _fresh(model, new)
        assert _error(_repositioned(repositioner, layout, stored, old, new), fresh) <= 1e-5
        assert _error(stored, fresh) > 0.1, "a plain copy would have done: this shows nothing"


@pytest.mark.parametrize("name", ["yarn", "llama3"])
def test_a_chunk_longer_than_the_original_length(name: str, tiny: Callable[..., Any]) -> None:
    model = _build(tiny, name)
    layout = _layout(model)
    moved = _repositioned(probe_reposition(model, layout), layout, _fresh(model, 3, tokens=200), 3, 60)
    assert _error(moved, _fresh(model, 60, tokens=200)) <= 1e-5


@settings(deadline=None, max_examples=40)
@given(old=st.integers(0, 100_000), new=st.integers(0, 100_000), tokens=st.integers(1, 70))
def test_any_move_of_any_length(old: int, new: int, tokens: int, tiny: Callable[..., Any]) -> None:
    model = _build(tiny, "default")
    layout = _layout(model)
    repositioner = probe_reposition(model, layout)
    stored = _fresh(model, old, tokens)
    moved = _repositioned(repositioner, layout, stored, old, new)
    assert _error(moved, _fresh(model, new, tokens)) <= 1e-5
    back = _repositioned(repositioner, layout, moved, new, old)  # span() gives views: strided blocks work too
    assert _error(back, stored) <= 1e-5


@pytest.mark.parametrize("name", ["default", "yarn", "interleaved", "by layer type, gemma3", "layers without, smollm3"])
def test_low_precision_stays_within_its_rounding(name: str, tiny: Callable[..., Any]) -> None:
    model = _build(tiny, name, dtype=torch.bfloat16)
    layout = _layout(model)
    repositioner = probe_reposition(model, layout)
    for old, new in ((0, 37), (512, 3), (0, 100_000)):
        assert _error(_repositioned(repositioner, layout, _fresh(model, old), old, new), _fresh(model, new)) <= 2e-2


def test_low_precision_is_rounded_once(tiny: Callable[..., Any]) -> None:
    narrow, wide = _build(tiny, "default", dtype=torch.bfloat16), _build(tiny, "default")
    layouts = _layout(narrow), _layout(wide)
    (block,) = _fresh(narrow, 9)
    (moved,) = _repositioned(probe_reposition(narrow, layouts[0]), layouts[0], [block], 9, 300)
    (precise,) = _repositioned(probe_reposition(wide, layouts[1]), layouts[1], [block.float()], 9, 300)
    assert torch.equal(moved, precise.bfloat16())


@pytest.mark.parametrize("name", ["default", "interleaved", "by layer type, gemma3"])
def test_a_text_read_together_moves_whole(name: str, tiny: Callable[..., Any]) -> None:
    model = _build(tiny, name)
    layout = _layout(model)
    ids = torch.arange(1, 25) * 11 % 97

    def read(start: int) -> SlabCache:
        cache = SlabCache(layout, capacity=len(ids))
        positions = torch.arange(start, start + len(ids)).view(1, -1)
        with torch.no_grad():
            model(input_ids=ids.view(1, -1), position_ids=positions, past_key_values=cache, use_cache=True)
        return cache

    moved = _repositioned(probe_reposition(model, layout), layout, read(0).extract(0, 24), 0, 37)
    assert _error(moved, read(37).extract(0, 24)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staying_in_place_is_a_plain_copy(dtype: torch.dtype, tiny: Callable[..., Any]) -> None:
    model = _build(tiny, "yarn", dtype=dtype)
    layout = _layout(model)
    block = _fresh(model, 900)
    moved = _repositioned(probe_reposition(model, layout), layout, block, 900, 900)
    assert all(torch.equal(a, b) for a, b in zip(moved, block, strict=True))


@pytest.mark.parametrize("name", ["partial, phi", "layers without, smollm3"])
def test_what_does_not_rotate_is_copied_bit_for_bit(name: str, tiny: Callable[..., Any]) -> None:
    model = _build(tiny, name)
    layout = _layout(model)
    (block,) = _fresh(model, 0)  # [slots, heads, tokens, dim]
    (moved,) = _repositioned(probe_reposition(model, layout), layout, [block], 0, 700)
    assert torch.equal(moved[1::2], block[1::2])
    if name == "partial, phi":
        assert torch.equal(moved[..., 8:], block[..., 8:])
    else:
        assert torch.equal(moved[[4, 8]], block[[4, 8]])


def test_only_the_rows_named_are_written(tiny: Callable[..., Any]) -> None:
    model = _build(tiny, "by layer type, gemma3")
    layout = _layout(model)
    repositioner = probe_reposition(model, layout)
    cache = SlabCache(layout, capacity=256, batch=3)  # zeroed
    repositioner.place(cache, [Move(_fresh(model, 5), 5, 90)], row=1)
    right = _fresh(model, 90)
    assert _error([slab[:, 1, :, 90:130] for slab in cache.slabs], right) <= 1e-5
    for slab in cache.slabs:
        slab[:, 1, :, 90:130] = 0
        assert not slab.any()


def test_threads_do_not_disturb_each_other(tiny: Callable[..., Any]) -> None:
    model = _build(tiny, "longrope")  # its rotary module writes to itself on every call
    layout = _layout(model)
    repositioner = probe_reposition(model, layout)
    block = _fresh(model, 11)
    alone = [_repositioned(repositioner, layout, block, 11, new) for new in range(100, 164)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda new: _repositioned(repositioner, layout, block, 11, new), range(100, 164)))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_rope_keeps_its_state_and_its_limit(kind: str) -> None:
    rope = {"rope_type": kind, "factor": 2.0, **_THETA}
    if kind == "longrope":
        rope = {**_LONGROPE, "original_max_position_embeddings": 256}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=512 if kind == "longrope" else 256)
    layout = _layout(model)
    with torch.no_grad():
        model(input_ids=torch.ones(1, 300, dtype=torch.long))  # beyond the original length: other frequencies now
    rotary = model.model.rotary_emb
    frequencies, length = rotary.inv_freq, rotary.max_seq_len_cached
    assert not torch.equal(frequencies, rotary.original_inv_freq)
    repositioner = probe_reposition(model, layout)
    short = [torch.randn(4, 2, 30, 8)]
    moved = _repositioned(repositioner, layout, short, 0, 200)
    assert rotary.inv_freq is frequencies
    assert rotary.max_seq_len_cached == length
    assert _error(_repositioned(repositioner, layout, _fresh(model, 1), 1, 200), _fresh(model, 200)) <= 1e-5
    for old, new in ((0, 226), (226, 0)):
        with pytest.raises(ValueError, match="change beyond 255"):
            _repositioned(repositioner, layout, short, old, new)
    assert torch.equal(_repositioned(repositioner, layout, short, 0, 200)[0], moved[0])


def test_what_does_not_fit_is_refused(tiny: Callable[..., Any]) -> None:
    model, other = _build(tiny, "default"), _build(tiny, "layers without, smollm3")
    layout = _layout(model)
    repositioner = probe_reposition(model, layout)
    with pytest.raises(ValueError, match="do not fit"):
        repositioner.place(SlabCache(layout, capacity=256), [Move(_fresh(model, 0), 0, 217)])
    with pytest.raises(ValueError, match="another layout"):
        repositioner.place(SlabCache(_layout(other), capacity=256), [Move(_fresh(model, 0), 0, 1)])


@given(indices=st.sets(st.integers(0, 60), max_size=40))
def test_slices_cover_each_index_once(indices: set[int]) -> None:
    covered = [index for part in _slices(sorted(indices)) for index in range(61)[part]]
    assert sorted(covered) == sorted(indices)


def test_slots_that_alternate_are_one_slice() -> None:
    assert _slices(list(range(1, 60, 2))) == [slice(1, 60, 2)]
    assert _slices([1, 3, 5, 6, 7, 9, 11, 13, 14, 15]) == [slice(1, 16, 2), slice(6, 15, 8)]
