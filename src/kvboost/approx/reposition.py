"""Moves stored KV to other positions: what depends on the position is rotated again, the rest is copied.

:func:`probe_reposition` is called once when an engine is made, :meth:`KeyRepositioner.place` by its prefill for every
block that is found at another position. Invariant: a moved row equals the row the model itself would have
written for the same hidden state at the new position, up to the rounding of one rotation.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVLayout, SlabCache, stock_cache
from kvboost.hf.probe import exact_limit_of, max_positions_of

_PROBE_TOKENS = 12
_FARTHEST_PROBE = 100_000
_DEFAULT_LIMIT = 4096  # positions tested where the model names no limit
# Largest difference, relative to the largest entry, that rounding the rotation twice explains. A wrong
# rotation is off by about 1.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_WITHOUT_MOVING = "Its text is reused only behind the same beginning."


@dataclass(frozen=True)
class _Rotary:
    """One of the model's own tables of rotary angles."""

    module: torch.nn.Module
    layer_type: str | None
    columns: slice  # where each frequency stands once: modules repeat them as (f, f), pairwise, or not at all
    device: torch.device

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine as the model uses them at ``positions`` [tokens]: [tokens, frequencies] each, float32."""
        cos, sin = _call(self.module, self.layer_type, positions.to(self.device))
        return cos[:, self.columns], sin[:, self.columns]

    def turn(self, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
    """How one slot turns with the position: by which rotary, and which of its dimensions are a pair."""

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
    """Rotations of some tokens from where they stood to somewhere else, each token by its own angle."""

    def __init__(
        self, rotations: Sequence[_Rotation | None], turns: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._rotations, self._turns = rotations, turns
        self._factors: dict[_Rotation, tuple[torch.Tensor, torch.Tensor]] = {}

    def apply(self, slot: int, states: torch.Tensor) -> torch.Tensor:
        """Float32 ``states`` [..., tokens, dim] of one slot as they would be at the new positions."""
        rotation = self._rotations[slot]
        if rotation is None:
            return states
        if rotation not in self._factors:
            cos, sin = (factor.to(states.device) for factor in self._turns[rotation.rotary])
            self._factors[rotation] = rotation.factors(cos, sin, states.shape[-1])
        turned = torch.empty_like(states)
        rotation.apply(states, *self._factors[rotation], out=turned)
        return turned


class KeyRepositioner:
    """Copies stored KV to other positions of a cache, re-rotating the keys on the way.

    Safe to use from several threads with different caches: it computes with copies of the model's rotary
    modules, so it neither sees nor leaves any trace of a request.
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
        # For every slab the slots that are treated alike, as slices: one call copies or turns them all.
        self._parts: list[list[tuple[slice, _Rotation | None]]] = []
        for slots in layout.groups.values():
            alike: dict[_Rotation | None, list[int]] = {}
            for index, slot in enumerate(slots):
                alike.setdefault(rotations[slot], []).append(index)
            self._parts.append([(part, kind) for kind, indices in alike.items() for part in _slices(indices)])

    @torch.no_grad()
    def place(
        self, cache: SlabCache, tensors: Sequence[torch.Tensor], *, old_start: int, new_start: int, row: int = 0
    ) -> None:
        """Copy a block whose first token stood at position old_start to rows from new_start on, as if read there.

        ``tensors`` are as :meth:`SlabCache.place` takes them and must not be views of the rows written.
        """
        tokens = tensors[0].shape[2]
        self._check(cache, max(old_start, new_start) + tokens, new_start + tokens)
        if old_start == new_start:
            cache.place(new_start, tensors, row=row)
            return
        turns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for slab, block, parts in zip(cache.slabs, tensors, self._parts, strict=True):
            target = slab[:, row, :, new_start : new_start + tokens]  # [slots, heads, tokens, dim]
            work = torch.promote_types(slab.dtype, torch.float32)
            for slots, rotation in parts:
                if rotation is None:
                    target[slots].copy_(block[slots], non_blocking=True)
                    continue
                if rotation.rotary not in turns:
                    steps = torch.arange(tokens)
                    turns[rotation.rotary] = self._rotaries[rotation.rotary].turn(steps + old_start, steps + new_start)
                cos, sin = (factor.to(slab.device, work) for factor in turns[rotation.rotary])
                whole, sin = rotation.factors(cos, sin, slab.shape[-1])
                source = block[slots].to(slab.device, work)
                if slab.dtype == work:
                    rotation.apply(source, whole, sin, target[slots])
                else:
                    turned = torch.empty_like(source)
                    rotation.apply(source, whole, sin, turned)
                    target[slots].copy_(turned)

    def can_move(self, end: int) -> bool:
        """Whether rows up to this position have the frequencies that hold here."""
        return self._limit is None or end <= self._limit

    @torch.no_grad()
    def turns(self, old: torch.Tensor, new: torch.Tensor) -> Rotations:
        """The rotations from positions ``old`` [tokens] to ``new``, for every slot."""
        return Rotations(self._rotations, [rotary.turn(old, new) for rotary in self._rotaries])

    def _check(self, cache: SlabCache, end: int, new_end: int) -> None:
        if cache.layout is not self._layout and cache.layout != self._layout:
            raise ValueError("this cache has another layout than the model that was probed")
        if new_end > cache.capacity:
            raise ValueError(f"rows up to {new_end} do not fit a cache of {cache.capacity}")
        if self._limit is not None and end > self._limit:
            raise ValueError(f"the rotary frequencies change beyond {self._limit} tokens; KV cannot be moved there")


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
    """Find out how each slot of the loaded model's cache depends on the position, by running it at two.

    Raises UnsupportedModelError if the KV cannot be moved, with the reason.
    """
    config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    name = config.model_type
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise UnsupportedModelError(
            f"{name} takes no positions (ALiBi, or none at all), so its KV cannot be tested at two. {_WITHOUT_MOVING}"
        )
    limit = exact_limit_of(config)[0]
    # The farther apart, the better every frequency shows; but inside what the model was made for.
    far = min(limit or max_positions_of(config) or _DEFAULT_LIMIT, _FARTHEST_PROBE) - _PROBE_TOKENS
    if far < 1:
        raise UnsupportedModelError(f"{name} reads too few positions to test moving its KV. {_WITHOUT_MOVING}")
    ids = torch.arange(_PROBE_TOKENS) * 7919 % min(config.vocab_size, 30_000)
    modules = [module for module in decoder.modules() if _layer_types(module)]
    with _state_kept(modules):
        near_slots, far_slots = (_read_single_tokens(model, decoder, ids, start) for start in (0, far))
    if len(near_slots) != len(layout.slots):
        raise UnsupportedModelError(f"{name} filled another number of cache layers than before. {_WITHOUT_MOVING}")
    rotaries = _distinct_rotaries(name, modules, far)
    steps = torch.arange(_PROBE_TOKENS)
    turns = [rotary.turn(steps, steps + far) for rotary in rotaries]
    rotations: list[_Rotation | None] = []
    for slot, (stored, fresh) in enumerate(zip(near_slots, far_slots, strict=True)):
        # [heads, tokens, dim] each
        error, rotation = _best_fit(stored, fresh, turns)
        if not error <= _TOLERANCE.get(fresh.dtype, 4e-2):  # written so that NaN fails too
            part = f"the {'values' if slot % 2 else 'keys'} of layer {slot // 2}"
            why = (
                f"and no rotation by its rotary embedding explains it (best is off by {error:.1e})"
                if rotaries
                else "and it has no rotary embedding module (learned positions, or RoPE inside its attention)"
            )
            raise UnsupportedModelError(f"{name}: {part} depend on the position, {why}. {_WITHOUT_MOVING}")
        rotations.append(rotation)
    if not any(rotations):
        raise UnsupportedModelError(f"{name} rotates no keys by position (no RoPE). {_WITHOUT_MOVING}")
    return KeyRepositioner(layout, rotaries=rotaries, rotations=rotations, limit=limit)


def _read_single_tokens(model: Any, decoder: Any, ids: torch.Tensor, start: int) -> list[torch.Tensor]:
    """The KV of each token, read alone at positions from ``start`` on: per slot [heads, tokens, dim].

    Alone, because a token that sees only itself has the same hidden state wherever it stands, to the last
    bit and at any depth: every layer then shows how its own KV depend on the position, and nothing else.
    """
    device = model.get_input_embeddings().weight.device
    cache = stock_cache()  # without a config every layer keeps all rows
    positions = torch.arange(start, start + len(ids), device=device)
    decoder(
        input_ids=ids.to(device).view(-1, 1), position_ids=positions.view(-1, 1), past_key_values=cache, use_cache=True
    )
    # [tokens, heads, 1, dim] in each layer
    return [tensor[:, :, 0].transpose(0, 1) for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _best_fit(
    stored: torch.Tensor, fresh: torch.Tensor, turns: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, _Rotation | None]:
    """The way of moving that brings ``stored`` closest to ``fresh``, [heads, tokens, dim], and how close."""
    dim = fresh.shape[-1]
    work = torch.promote_types(fresh.dtype, torch.float32)
    stored, fresh = stored.to(work), fresh.to(work)
    scale = fresh.abs().max().clamp_min(1e-12)
    best: tuple[float, _Rotation | None] = float((stored - fresh).abs().max() / scale), None
    for rotary, turn in enumerate(turns):
        cos, sin = (factor.to(fresh.device, work) for factor in turn)
        if 2 * cos.shape[-1] > dim:
            continue  # the table of layers with wider heads
        for interleaved in (False, True):
            rotation = _Rotation(rotary, cos.shape[-1], interleaved)
            moved = torch.empty_like(fresh)
            rotation.apply(stored, *rotation.factors(cos, sin, dim), out=moved)
            error = float((moved - fresh).abs().max() / scale)
            if error < best[0]:
                best = error, rotation
    return best


def _layer_types(module: torch.nn.Module) -> list[str | None]:
    """The arguments for which a rotary module has frequencies of its own; empty if it is none."""
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
        # Length-dependent types write to themselves when called; a copy keeps that away from the model.
        own = copy.deepcopy(module)
        device = next(buffer.device for buffer in own.buffers())
        for layer_type in _layer_types(module):
            try:
                cos, sin = _call(own, layer_type, positions.to(device))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise UnsupportedModelError(
                    f"{name}: its rotary embedding does not take plain positions ({error}). {_WITHOUT_MOVING}"
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
    like = torch.zeros(1, 1, 1, device=positions.device)  # a float32 input makes the module answer in float32
    kind = {} if layer_type is None else {"layer_type": layer_type}
    answer = module(like, position_ids=positions.view(1, -1), **kind)
    if isinstance(answer, torch.Tensor):  # some families multiply complex numbers
        answer = torch.view_as_real(answer).unbind(-1)
    cos, sin = (part.reshape(len(positions), part.shape[-1]).float() for part in answer)
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
    """Length-dependent rotary modules change when the model runs; put back what they were."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            for current, earlier in ((vars(module), attributes), (module._buffers, buffers)):
                for name in current.keys() - earlier.keys():
                    del current[name]
                current.update(earlier)
