"""Recomputes selected positions of a sequence in place, optionally fewer from layer to layer.

Called by the engine to repair repositioned chunks. Invariants: a position attends to every known position up to
itself, recomputed or not; a dropped position keeps what the cache holds for it from that layer on. Hooks stay on the
decoder layers while a runner lives and do nothing outside its own passes in their own threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvboost.approx.attention import AttentionTap, BlockedAttention, EagerTap, StopForward
from kvboost.errors import UnsupportedModelError
from kvboost.hf.attention import NAME, attending
from kvboost.hf.cache import KVLayout, SlabCache
from kvboost.hf.cache_layers import KVChanges, Spreading
from kvboost.hf.layers import attention_windows, decoder_layers
from kvboost.hf.probe import compare_logits
from kvboost.hf.runner import ModelRunner

_PROBE_TOKENS = 12
_PREFIX_REUSE_ONLY = "Only exact prefix reuse is available for it."
MAX_POSITIONS = 2048  # per forward: bounds the mask, [positions, keys]


_TAKES_MASKS = (NAME, "eager")
"""Attention implementations that take a dense mask."""

SpreadMaker = Callable[..., Spreading]
"""Given the positions that are recomputed, and ``begin`` and ``end`` of those that may be adjusted, makes what spreads
the change of the first to the others."""

PositionSelector = Callable[[int, torch.Tensor, KVChanges | None], torch.Tensor | None]
"""Called before each layer with its index, the positions [n] that reach it (on the CPU) and what the layer before
changed in them (on its device). Returns which of them continue (indices into the positions, ascending, on the CPU), or
None for all. Runs between two layers: reading from the device there makes the host wait for it."""


@dataclass
class _Pass:
    """One forward over positions, as the hooks see it."""

    cache: SlabCache
    positions: torch.Tensor  # [n] still running; on the CPU, so that nobody asks a device for what the host knows
    choose: PositionSelector | None = None
    make_spread: Callable[[torch.Tensor], Spreading] | None = None
    kept: torch.Tensor | None = None  # [n] indices into the positions the forward began with; on the CPU
    sliced: dict[tuple[int, torch.device], tuple[Any, Any]] = field(default_factory=dict)
    layer_positions: int = 0
    """Positions computed so far, summed over layers."""

    def reaching(self) -> torch.Tensor:
        """The positions that reach the layer that runs now."""
        return self.positions

    def spread_of(self, positions: torch.Tensor) -> Spreading | None:
        """What spreads the change of these positions to others, if requested."""
        return self.make_spread(positions) if self.make_spread is not None else None


class RecomputeRunner:
    """Forward passes over selected positions of one model. ``close`` removes its hooks from the model."""

    def __init__(self, runner: ModelRunner) -> None:
        implementation = runner.model.config._attn_implementation
        if implementation not in _TAKES_MASKS:  # flash dies of one with an assert that ends the process
            raise UnsupportedModelError(
                f"the attention of {implementation!r} takes no mask of chosen positions; load the model with "
                "attn_implementation='sdpa' for non-prefix reuse"
            )
        self._runner = runner
        self._model = runner.model
        self._active = threading.local()
        self._layers = decoder_layers(runner.model)
        self._windows = attention_windows(runner.model)
        hooks = [
            layer.register_forward_pre_hook(_narrowing_hook(index, self._active), with_kwargs=True)
            for index, layer in enumerate(self._layers)
        ]
        self._remove_hooks = weakref.finalize(self, _remove, hooks)  # also for an engine that was never closed

    @property
    def layer_count(self) -> int:
        """Decoder layers of the model."""
        return len(self._layers)

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._remove_hooks()

    @torch.no_grad()
    def recompute_positions(
        self,
        token_ids: Sequence[int],
        cache: SlabCache,
        positions: Sequence[int] | torch.Tensor,
        *,
        logits: bool = True,
        choose: PositionSelector | None = None,
        watch: Sequence[int] = (),
        spread: SpreadMaker | None = None,
    ) -> tuple[torch.Tensor | None, int]:
        """Recompute the given positions of a sequence the cache already holds, in place.

        ``token_ids`` is the whole sequence, ``positions`` are ascending. Layers in ``watch`` record their changes;
        ``spread`` makes what spreads them to other positions. Returns the logits of the last position, [vocab], if
        ``logits``, and the number of positions computed, summed over layers. More than a few thousand positions run
        in several forwards, in order.
        """
        length = cache.get_seq_length()
        if len(token_ids) != length:
            raise ValueError(f"the cache holds {length} positions, the sequence has {len(token_ids)} tokens")
        wanted = torch.as_tensor(positions)
        ids = torch.as_tensor(token_ids)
        last: torch.Tensor | None = None
        layer_positions = 0
        parts = torch.split(wanted, MAX_POSITIONS)
        for index, part in enumerate(parts):
            begin = int(part[0]) if index else 0
            end = int(parts[index + 1][0]) if index + 1 < len(parts) else length
            running = _Pass(cache, part, choose, partial(spread, begin=begin, end=end) if spread else None)
            inputs = torch.stack([part, ids[part]]).to(self._runner.device)  # in one copy
            rewriting = cache.rewriting(inputs[0], watch=watch, spread=running.spread_of(part))
            with self._running(running), rewriting, attending(BlockedAttention(running.reaching)):
                last = self._runner.run(
                    inputs[1:],
                    cache,
                    logits=logits,
                    attention_mask=self._masks(inputs[0], length),
                    position_ids=inputs[:1],
                )
            layer_positions += running.layer_positions
        return last, layer_positions

    @torch.no_grad()
    def attention_to(
        self, token_ids: Sequence[int], cache: SlabCache, *, known: torch.Tensor, layers: range, ahead: int = 0
    ) -> torch.Tensor:
        """The share of the given tokens' attention on each cached position: [layers, cached], averaged over heads.

        ``token_ids`` begin ``ahead`` positions after the end of the cache. They see each other and the cached positions
        marked in ``known`` [cached]. Runs up to the last of ``layers``; the cache keeps its length.
        """
        start, count = cache.get_seq_length(), len(token_ids)
        device = self._runner.device
        positions = torch.arange(start, start + count, device=device)
        mask = self._masks(positions, start + count, known=known.to(device))
        tap = AttentionTap(layers, cached=start)
        try:
            with (
                self._running(_Pass(cache, torch.arange(count))),
                attending(tap),
                EagerTap(tap, keys=start + count),
            ):
                self._runner.run(
                    torch.as_tensor(token_ids, device=device).view(1, -1),
                    cache,
                    logits=False,
                    attention_mask=mask,
                    position_ids=positions.view(1, -1) + ahead,
                )
        except StopForward:
            pass  # the layers after the last requested one need not run
        finally:
            cache.set_length(start)
        if len(tap.masses) != len(layers):
            raise UnsupportedModelError(
                f"the attention of {self._model.config._attn_implementation!r} cannot be watched; load the model with "
                "attn_implementation='sdpa' or choose a repair strategy that needs no attention"
            )
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for mass in tap.masses:
            by_device.setdefault(mass.device, []).append(mass)
        return torch.cat([torch.stack(masses).to(device) for masses in by_device.values()])

    def _masks(self, positions: torch.Tensor, length: int, *, known: torch.Tensor | None = None) -> Any:
        """The attention mask of each position: [1, 1, positions, length], or one per kind of layer."""
        keys = torch.arange(length, device=positions.device)
        visible = keys <= positions.view(-1, 1)
        if known is not None:
            visible[:, : len(known)] &= known
        masks = {}
        for kind, window in self._windows.items():
            seen = visible if window is None else visible & (keys > positions.view(-1, 1) - window)
            masks[kind] = self._in_model_format(seen.view(1, 1, *seen.shape))
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _in_model_format(self, mask: torch.Tensor) -> torch.Tensor:
        if self._model.config._attn_implementation == NAME:
            return mask
        lowest = torch.finfo(self._model.dtype).min  # the others take an additive mask
        return torch.where(mask, 0.0, lowest).to(self._model.dtype)

    @contextmanager
    def _running(self, running: _Pass) -> Iterator[None]:
        self._active.now = running
        try:
            yield
        finally:
            self._active.now = None


def _narrowing_hook(index: int, active: threading.local) -> Callable[..., Any]:
    def before_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running: _Pass | None = getattr(active, "now", None)
        if running is None:
            return None
        layers = running.cache.layers
        chosen = None
        if running.choose is not None:
            chosen = running.choose(index, running.positions, layers[index - 1].changes if index else None)
        if chosen is not None:
            running.positions = running.positions[chosen]
            running.kept = chosen if running.kept is None else running.kept[chosen]
            running.sliced.clear()
            running.cache.narrow(running.positions, from_layer=index, spread=running.spread_of(running.positions))
            hidden = args[0] if args else kwargs["hidden_states"]
            hidden = hidden.index_select(1, chosen.to(hidden.device))
            args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
        running.layer_positions += len(running.positions)
        device = layers[index].device
        return args, {name: _narrowed(name, value, running, device) for name, value in kwargs.items()}

    return before_layer


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def probe_recompute(runner: ModelRunner, layout: KVLayout, *, attention_layers: range) -> RecomputeRunner:
    """A runner for this model, after testing that positions can be recomputed, dropped and watched.

    Raises UnsupportedModelError with the reason if they cannot.
    """
    recompute = RecomputeRunner(runner)
    config = runner.model.config.get_text_config(decoder=True)
    tokens = (torch.arange(_PROBE_TOKENS) * 7919 % min(config.vocab_size, 30_000)).tolist()
    cache = SlabCache(layout, capacity=_PROBE_TOKENS)
    whole = runner.append(tokens, cache, logits=True)
    middle = recompute.layer_count // 2

    def drop_one(layer: int, positions: torch.Tensor, changes: KVChanges | None) -> torch.Tensor | None:
        return torch.tensor([1, 2], device=positions.device) if layer == middle else None

    try:
        recomputed, count = recompute.recompute_positions(tokens, cache, [3, 7, _PROBE_TOKENS - 1], choose=drop_one)
        if count != 3 * middle + 2 * (recompute.layer_count - middle):
            raise UnsupportedModelError(f"{config.model_type} does not run its decoder layers one after another")
        if attention_layers:
            cache.set_length(_PROBE_TOKENS - 2)
            known = torch.ones(_PROBE_TOKENS - 2, dtype=torch.bool)
            recompute.attention_to(tokens[-2:], cache, known=known, layers=attention_layers)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        recompute.close()
        raise UnsupportedModelError(f"{config.model_type} cannot recompute single positions ({error})") from error
    except UnsupportedModelError:
        recompute.close()
        raise
    assert whole is not None
    assert recomputed is not None
    compare_logits(config, whole, recomputed, "a few of its positions are recomputed", remedy=_PREFIX_REUSE_ONLY)
    return recompute


# The dimension of positions in a decoder layer's arguments other than the hidden states.
_POSITION_DIMENSION = {"attention_mask": -2, "position_embeddings": -2, "position_ids": -1}


def _narrowed(name: str, value: Any, running: _Pass, device: torch.device) -> Any:
    """A layer's argument with only the positions still running, on the layer's device.

    The model passes the same objects to every layer, so each is cut once, and copied once to each device.
    """
    if name not in _POSITION_DIMENSION or value is None:
        return value
    whole, part = running.sliced.get((id(value), device), (None, None))
    if whole is not value:
        pieces = value if isinstance(value, tuple) else (value,)
        if running.kept is not None:
            dim, kept = _POSITION_DIMENSION[name], running.kept.to(pieces[0].device)
            pieces = tuple(piece.index_select(dim, kept) for piece in pieces)
        pieces = tuple(piece.to(device) for piece in pieces)
        part = pieces if isinstance(value, tuple) else pieces[0]
        running.sliced[id(value), device] = (value, part)  # keeps it alive, so that its id stays unique
    return part
