"""Copies stored KV to other positions: keys are re-rotated (re-RoPE), everything else is copied.

:func:`probe_reposition` runs once when an engine is made, :meth:`KeyRepositioner.place` once per request, for all
blocks that were computed at other positions. Invariant: repositioned KV equals what the model itself would have written
for the same hidden state at the new position, up to the rounding of one rotation.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVLayout, SlabCache, stock_cache
from kvboost.hf.probe import exact_limit_of, max_positions_of

_PROBE_TOKENS = 12
_MAX_PROBE_POSITION = 100_000
_DEFAULT_LIMIT = 4096  # positions tested where the model names no limit
# Largest difference, relative to the largest entry, that rounding the rotation twice explains. A wrong
# rotation is off by about 1.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# Placed at once. On an accelerator as much as keeps it busy, on the CPU about what stays in the cache of a core.
_BATCH_BYTES = 64 * 2**20
_CPU_BATCH_BYTES = 2 * 2**20
_PREFIX_REUSE_ONLY = "Only exact prefix reuse is available for it."


@dataclass(frozen=True)
class _Rotary:
    """One of the model's own tables of rotary angles."""

    module: torch.nn.Module
    layer_type: str | None
    columns: slice  # each frequency once: modules repeat them as (f, f), pairwise, or not at all
    device: torch.device

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine as the model uses them at ``positions`` [tokens]: [tokens, frequencies] each, float32."""
        cos, sin = _call(self.module, self.layer_type, positions.to(self.device))
        return cos[:, self.columns], sin[:, self.columns]

    def rotation_between(self, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, [tokens, frequencies], of the rotation from the old positions [tokens] to the new ones."""
        cos, sin = self.angles(torch.cat([old, new]))
        old_cos, new_cos = cos.chunk(2)
        old_sin, new_sin = sin.chunk(2)
        # Not the angle (new - old) * frequency: at position 100,000 the model's own float32 angle is off by
        # 4e-3, and fresh keys carry that error. Dividing new by old, as complex numbers, takes out the old
        # error, puts in the new one, and cancels the attention scaling that both carry.
        norm = old_cos.square().addcmul_(old_sin, old_sin)
        return (new_cos * old_cos + new_sin * old_sin) / norm, (new_sin * old_cos - new_cos * old_sin) / norm


class _Rotation(NamedTuple):
    """How one slot rotates with the position: its rotary table, and which dimensions form a pair."""

    rotary: int
    frequencies: int  # the first 2 * frequencies dimensions are rotated
    interleaved: bool  # pairs (2i, 2i + 1); otherwise (i, i + frequencies)

    def pairs(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the two halves of every pair, [..., frequencies] each."""
        half, end = self.frequencies, 2 * self.frequencies
        if self.interleaved:
            return tensor[..., 0:end:2], tensor[..., 1:end:2]
        return tensor[..., :half], tensor[..., half:end]

    def factors(self, cos: torch.Tensor, sin: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What :meth:`apply` takes: [tokens, dim], one where a dimension is not rotated, and [tokens, frequencies]."""
        whole = cos.new_ones(cos.shape[0], dim)
        for half in self.pairs(whole):
            half.copy_(cos)
        return whole, sin

    def apply(self, source: torch.Tensor, whole: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rotated ``source`` [..., tokens, dim] to ``out``, without temporaries."""
        torch.mul(source, whole, out=out)
        left, right = self.pairs(source)
        out_left, out_right = self.pairs(out)
        out_left.addcmul_(right, sin, value=-1)
        out_right.addcmul_(left, sin)


class Rotations:
    """Rotations of some tokens from old to new positions, each token by its own angle."""

    def __init__(
        self, rotations: Sequence[_Rotation | None], angles: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._rotations, self._angles = rotations, angles
        self._factors: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def apply(self, slot: int, states: torch.Tensor) -> torch.Tensor:
        """Float32 ``states`` [..., tokens, dim] of one slot as they would be at the new positions."""
        rotation = self._rotations[slot]
        if rotation is None:
            return states
        rotated = torch.empty_like(states)
        rotation.apply(states, *self.factors(rotation, states), out=rotated)
        return rotated

    def factors(self, rotation: _Rotation, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``rotation`` takes for states like these: made once per device, whatever the number of layers."""
        key = (rotation, like.device, like.shape[-1], like.dtype)
        if key not in self._factors:
            cos, sin = (factor.to(like.device, like.dtype) for factor in self._angles[rotation.rotary])
            self._factors[key] = rotation.factors(cos, sin, like.shape[-1])
        return self._factors[key]


@dataclass(frozen=True)
class Move:
    """A block that was computed at ``old_start`` and goes to the positions from ``new_start`` on."""

    tensors: Sequence[torch.Tensor]
    """As :meth:`SlabCache.place` takes them: [slots, heads, tokens, dim] per slab."""
    old_start: int
    new_start: int

    @property
    def tokens(self) -> int:
        """Positions it takes."""
        return self.tensors[0].shape[2]

    @property
    def new_end(self) -> int:
        """The position behind it."""
        return self.new_start + self.tokens

    @property
    def stays(self) -> bool:
        """Whether it keeps its position."""
        return self.old_start == self.new_start


class KeyRepositioner:
    """Copies stored KV to other positions of a cache, re-rotating the keys on the way.

    Thread-safe for different caches: it uses copies of the model's rotary modules, so it depends on no request and
    affects none.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        rotaries: Sequence[_Rotary],
        rotations: Sequence[_Rotation | None],
        limit: int | None,
    ) -> None:
        self._layout = layout
        self._rotaries = rotaries
        self._rotations = rotations
        self._limit = limit
        # For every slab the slots with the same rotation, as slices: one call copies or rotates them all.
        self._parts: list[list[tuple[slice, _Rotation | None]]] = []
        for slots in layout.groups.values():
            alike: dict[_Rotation | None, list[int]] = {}
            for index, slot in enumerate(slots):
                alike.setdefault(rotations[slot], []).append(index)
            self._parts.append([(part, kind) for kind, indices in alike.items() for part in _slices(indices)])

    @torch.no_grad()
    def place(self, cache: SlabCache, moves: Iterable[Move], *, row: int = 0) -> None:
        """Copy blocks that were computed elsewhere to their new positions, given in ascending order.

        They are taken one after another and placed in batches: the number of calls does not grow with the number of
        blocks, nor the memory with all of them. Blocks must not be views of the target positions.
        """
        on_cpu = all(slab.device.type == "cpu" for slab in cache.slabs)
        limit = _CPU_BATCH_BYTES if on_cpu else _BATCH_BYTES
        batch: list[Move] = []
        held = 0
        for move in moves:
            self._check(cache, max(move.old_start, move.new_start) + move.tokens, move.new_start + move.tokens)
            size = sum(tensor.numel() * tensor.element_size() for tensor in move.tensors)
            gap = on_cpu and batch and batch[-1].new_end != move.new_start  # a slice is cheaper there than an index
            if batch and (gap or held + size > limit or batch[-1].stays != move.stays):
                self._place(cache, batch, row)
                batch, held = [], 0
            batch.append(move)
            held += size
        if batch:
            self._place(cache, batch, row)

    def _place(self, cache: SlabCache, batch: Sequence[Move], row: int) -> None:
        """One copy or one rotation per slab and kind of slot, for all positions at once."""
        new = torch.cat([torch.arange(move.new_start, move.new_end) for move in batch])
        rotations = None
        if not batch[0].stays:  # otherwise a plain copy: turning by zero would still round
            old = torch.cat([torch.arange(move.old_start, move.old_start + move.tokens) for move in batch])
            rotations = self.rotations(old, new)
        together = all(move.new_end == after.new_start for move, after in pairwise(batch))
        blocks = zip(*(move.tensors for move in batch), strict=True)
        for slab, tensors, parts in zip(cache.slabs, blocks, self._parts, strict=True):
            source = _joined(tensors, slab.device)  # [slots, heads, tokens, dim]
            work = torch.promote_types(slab.dtype, torch.float32)
            target, index = slab[:, row, :, batch[0].new_start : batch[-1].new_end], None
            if not together:
                target, index = slab[:, row], new.to(slab.device)
            for slots, rotation in parts:
                states, out = source[slots], target[slots]
                if rotation is not None and rotations is not None:
                    states = states.to(work)
                    direct = index is None and slab.dtype == work
                    turned = out if direct else torch.empty_like(states)
                    rotation.apply(states, *rotations.factors(rotation, states), out=turned)
                    if direct:
                        continue
                    states = turned.to(slab.dtype)
                if index is None:
                    out.copy_(states, non_blocking=True)
                else:
                    out.index_copy_(2, index, states)

    def can_reposition(self, end: int) -> bool:
        """Whether positions up to this one share the rotary frequencies of this table."""
        return self._limit is None or end <= self._limit

    @torch.no_grad()
    def rotations(self, old: torch.Tensor, new: torch.Tensor) -> Rotations:
        """The rotations from positions ``old`` [tokens] to ``new``, for every slot."""
        return Rotations(self._rotations, [rotary.rotation_between(old, new) for rotary in self._rotaries])

    def _check(self, cache: SlabCache, end: int, new_end: int) -> None:
        if cache.layout is not self._layout and cache.layout != self._layout:
            raise ValueError("this cache has another layout than the model that was probed")
        if new_end > cache.capacity:
            raise ValueError(f"positions up to {new_end} do not fit a cache of {cache.capacity}")
        if self._limit is not None and end > self._limit:
            raise ValueError(
                f"the rotary frequencies change beyond {self._limit} tokens; KV cannot be repositioned there"
            )


def _joined(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Blocks [slots, heads, tokens, dim] one behind the other, on ``device``: joined before they are copied there."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.to(device, non_blocking=True) for tensor in tensors]
    whole = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=2)
    return whole.to(device, non_blocking=True)


def _slices(indices: list[int]) -> list[slice]:
    """Ascending ``indices`` as few regular slices: the longest from the lowest index on, then the rest."""
    slices, left = [], list(indices)
    while left:
        runs = []
        for step in [index - left[0] for index in left[1:]] or [1]:
            end = left[0]
            while end in left:
                end += step
            runs.append(range(left[0], end, step))
        longest = max(runs, key=len)
        slices.append(slice(longest.start, longest[-1] + 1, longest.step))
        left = [index for index in left if index not in longest]
    return slices


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
    rotations: list[_Rotation | None] = []
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
) -> tuple[float, _Rotation | None]:
    """The rotation that brings ``stored`` closest to ``fresh``, [heads, tokens, dim], and its error."""
    dim = fresh.shape[-1]
    work = torch.promote_types(fresh.dtype, torch.float32)
    stored, fresh = stored.to(work), fresh.to(work)
    scale = fresh.abs().max().clamp_min(1e-12)
    best: tuple[float, _Rotation | None] = float((stored - fresh).abs().max() / scale), None
    for rotary, angle in enumerate(angles):
        cos, sin = (factor.to(fresh.device, work) for factor in angle)
        if 2 * cos.shape[-1] > dim:
            continue  # the table of layers with wider heads
        for interleaved in (False, True):
            rotation = _Rotation(rotary, cos.shape[-1], interleaved)
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


def _distinct_rotaries(name: str, modules: Sequence[torch.nn.Module], far: int) -> list[_Rotary]:
    """The model's rotary tables, each once however many modules repeat it."""
    positions = torch.cat([torch.arange(_PROBE_TOKENS), torch.arange(far, far + _PROBE_TOKENS)])
    rotaries: list[_Rotary] = []
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in modules:
        # Length-dependent types write to themselves when called; a copy protects the model.
        own = copy.deepcopy(module)
        device = next(buffer.device for buffer in own.buffers())
        for layer_type in _layer_types(module):
            try:
                cos, sin = _call(own, layer_type, positions.to(device))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise UnsupportedModelError(
                    f"{name}: its rotary embedding does not take plain positions ({error}). {_PREFIX_REUSE_ONLY}"
                ) from error
            rotary = _Rotary(own, layer_type, _columns(cos, sin), device)
            table = rotary.angles(positions)
            if not any(torch.equal(table[0], cos) and torch.equal(table[1], sin) for cos, sin in seen):
                rotaries.append(rotary)
                seen.append(table)
    return rotaries


def _call(
    module: torch.nn.Module, layer_type: str | None, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's cosine and sine at ``positions`` [tokens]: [tokens, width] each, in float32."""
    like = torch.zeros(1, 1, 1, device=positions.device)  # a float32 input gives float32 results
    kind = {} if layer_type is None else {"layer_type": layer_type}
    result = module(like, position_ids=positions.view(1, -1), **kind)
    if isinstance(result, torch.Tensor):  # some families multiply complex numbers
        result = torch.view_as_real(result).unbind(-1)
    cos, sin = (part.reshape(len(positions), part.shape[-1]).float() for part in result)
    return cos, sin


def _columns(cos: torch.Tensor, sin: torch.Tensor) -> slice:
    """Which columns of a table [tokens, width] name every frequency once."""
    half = cos.shape[1] // 2
    if cos.shape[1] % 2 == 0:
        if all(torch.equal(table[:, :half], table[:, half:]) for table in (cos, sin)):
            return slice(0, half)
        if all(torch.equal(table[:, ::2], table[:, 1::2]) for table in (cos, sin)):
            return slice(0, None, 2)
    return slice(None)


@contextmanager
def _state_kept(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Length-dependent rotary modules change when the model runs; restore them afterwards."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            for current, earlier in ((vars(module), attributes), (module._buffers, buffers)):
                for name in current.keys() - earlier.keys():
                    del current[name]
                current.update(earlier)
