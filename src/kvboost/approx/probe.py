"""Finds out how a model's KV depends on the position, by running it: which slots rotate, and by which angles.

Called once when an engine with non-prefix reuse is made. Invariant: a model passes only if the rotations found here
explain how all its KV differs between two positions, and is refused with the reason otherwise; it is left as it was.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvboost.approx.reposition import KeyRepositioner, Rotary, Rotation
from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVLayout, stock_cache
from kvboost.hf.probe import exact_limit_of, max_positions_of

_PROBE_TOKENS = 12
_MAX_PROBE_POSITION = 100_000
_DEFAULT_LIMIT = 4096  # positions tested where the model names no limit
# Largest difference, relative to the largest entry, that rounding the rotation twice explains. A wrong
# rotation is off by about 1.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_PREFIX_REUSE_ONLY = "Only exact prefix reuse is available for it."


@torch.no_grad()
def probe_reposition(model: Any, layout: KVLayout) -> KeyRepositioner:
    """Find out how each slot of the model's cache depends on the position, by running the model at two positions.

    Raises UnsupportedModelError with the reason if the KV cannot be repositioned.
    """
    config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    name = config.model_type
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise UnsupportedModelError(
            f"{name} takes no positions (ALiBi, or none at all), so its KV cannot be tested. {_PREFIX_REUSE_ONLY}"
        )
    limit = exact_limit_of(config)[0]
    # Far apart, so that every frequency shows, but within the model's own range.
    far = min(limit or max_positions_of(config) or _DEFAULT_LIMIT, _MAX_PROBE_POSITION) - _PROBE_TOKENS
    if far < 1:
        raise UnsupportedModelError(f"{name} has too few positions to test repositioning its KV. {_PREFIX_REUSE_ONLY}")
    ids = torch.arange(_PROBE_TOKENS) * 7919 % min(config.vocab_size, 30_000)
    modules = [module for module in decoder.modules() if _layer_types(module)]
    with _state_kept(modules):
        near_slots, far_slots = (_kv_of_single_tokens(model, decoder, ids, start) for start in (0, far))
    if len(near_slots) != len(layout.slots):
        raise UnsupportedModelError(f"{name} filled another number of cache layers than before. {_PREFIX_REUSE_ONLY}")
    rotaries = _distinct_rotaries(name, modules, far)
    steps = torch.arange(_PROBE_TOKENS)
    angles = [rotary.rotation_between(steps, steps + far) for rotary in rotaries]
    rotations: list[Rotation | None] = []
    for slot, (stored, fresh) in enumerate(zip(near_slots, far_slots, strict=True)):
        # [heads, tokens, dim] each
        error, rotation = _best_fit(stored, fresh, angles)
        if not error <= _TOLERANCE.get(fresh.dtype, 4e-2):  # written so that NaN fails too
            part = f"the {'values' if slot % 2 else 'keys'} of layer {slot // 2}"
            why = (
                f"and no rotation by its rotary embedding explains it (best is off by {error:.1e})"
                if rotaries
                else "and it has no rotary embedding module (learned positions, or RoPE inside its attention)"
            )
            raise UnsupportedModelError(f"{name}: {part} depend on the position, {why}. {_PREFIX_REUSE_ONLY}")
        rotations.append(rotation)
    if not any(rotations):
        raise UnsupportedModelError(f"{name} rotates no keys by position (no RoPE). {_PREFIX_REUSE_ONLY}")
    return KeyRepositioner(layout, rotaries=rotaries, rotations=rotations, limit=limit)


def _kv_of_single_tokens(model: Any, decoder: Any, ids: torch.Tensor, start: int) -> list[torch.Tensor]:
    """The KV of each token, computed alone at positions from ``start`` on: per slot [heads, tokens, dim].

    A token that sees only itself has the same hidden state at any position, bit for bit and at any depth. So every
    layer shows how its own KV depends on the position, and nothing else.
    """
    device = model.get_input_embeddings().weight.device
    cache = stock_cache()  # no layer of it has a window
    positions = torch.arange(start, start + len(ids), device=device)
    decoder(
        input_ids=ids.to(device).view(-1, 1), position_ids=positions.view(-1, 1), past_key_values=cache, use_cache=True
    )
    # [tokens, heads, 1, dim] in each layer
    return [tensor[:, :, 0].transpose(0, 1) for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _best_fit(
    stored: torch.Tensor, fresh: torch.Tensor, angles: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, Rotation | None]:
    """The rotation that brings ``stored`` closest to ``fresh``, [heads, tokens, dim], and its error."""
    dim = fresh.shape[-1]
    work = torch.promote_types(fresh.dtype, torch.float32)
    stored, fresh = stored.to(work), fresh.to(work)
    scale = fresh.abs().max().clamp_min(1e-12)
    best: tuple[float, Rotation | None] = float((stored - fresh).abs().max() / scale), None
    for rotary, angle in enumerate(angles):
        cos, sin = (factor.to(fresh.device, work) for factor in angle)
        if 2 * cos.shape[-1] > dim:
            continue  # the table of layers with wider heads
        for interleaved in (False, True):
            rotation = Rotation(rotary, cos.shape[-1], interleaved)
            rotated = torch.empty_like(fresh)
            rotation.apply(stored, *rotation.factors(cos, sin, dim), out=rotated)
            error = float((rotated - fresh).abs().max() / scale)
            if error < best[0]:
                best = error, rotation
    return best


def _layer_types(module: torch.nn.Module) -> list[str | None]:
    """The layer types for which a rotary module has its own frequencies; empty for other modules."""
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return []
    names = [name for name, _ in module.named_buffers(recurse=False)]
    if "inv_freq" in names:
        return [None]
    kept = "original_inv_freq"  # a copy that length-dependent types return to
    return [name.removesuffix("_inv_freq") for name in names if name.endswith("_inv_freq") and not name.endswith(kept)]


def _distinct_rotaries(name: str, modules: Sequence[torch.nn.Module], far: int) -> list[Rotary]:
    """The model's rotary tables, each once however many modules repeat it."""
    positions = torch.cat([torch.arange(_PROBE_TOKENS), torch.arange(far, far + _PROBE_TOKENS)])
    rotaries: list[Rotary] = []
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in modules:
        # Length-dependent types write to themselves when called; a copy protects the model.
        own = copy.deepcopy(module)
        device = next(buffer.device for buffer in own.buffers())
        for layer_type in _layer_types(module):
            whole = Rotary(own, layer_type, slice(None), device)
            try:
                cos, sin = whole.angles(positions)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise UnsupportedModelError(
                    f"{name}: its rotary embedding does not take plain positions ({error}). {_PREFIX_REUSE_ONLY}"
                ) from error
            rotary = replace(whole, columns=_columns(cos, sin))
            table = rotary.angles(positions)
            if not any(torch.equal(table[0], cos) and torch.equal(table[1], sin) for cos, sin in seen):
                rotaries.append(rotary)
                seen.append(table)
    return rotaries


def _columns(cos: torch.Tensor, sin: torch.Tensor) -> slice:
    """Which columns of a table [tokens, width] name every frequency once."""
    half = cos.shape[1] // 2
    if cos.shape[1] % 2 == 0:
        if all(torch.equal(table[:, :half], table[:, half:]) for table in (cos, sin)):
            return slice(0, half)
        if all(torch.equal(table[:, ::2], table[:, 1::2]) for table in (cos, sin)):
            return slice(0, None, 2)
    return slice(None)


def _without_forward(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name != "forward"}


@contextmanager
def _state_kept(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Length-dependent rotary modules change when the model runs; restore them afterwards."""
    # But their forward, which another thread may have replaced for a step (hf/numerics/forwards.py).
    before = [(module, _without_forward(module), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            for current, earlier in ((vars(module), attributes), (module._buffers, buffers)):
                for name in current.keys() - earlier.keys() - {"forward"}:
                    del current[name]
                current.update(earlier)
