"""Computes chosen rows of a sequence again, in place, with fewer rows from layer to layer if asked.

Called by the engine to repair moved chunks. Invariants: a row attends to every known row up to itself,
recomputed or not; a dropped row keeps what the cache holds for it from that layer on. Hooks sit on the
decoder layers for as long as a runner lives and do nothing outside its own passes, thread by thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from kvboost.approx.attention import AttentionTap, BlockedAttention, SeenEnough
from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVChanges, KVLayout, SlabCache, Spreading
from kvboost.hf.layers import attention_windows, decoder_layers
from kvboost.hf.probe import compare_logits
from kvboost.hf.runner import ModelRunner

_PROBE_TOKENS = 12
_EXACT_GOES_ON = "Its text is reused only behind the same beginning."
_MAX_ROWS = 2048  # per forward: bounds the mask, which has rows x keys entries


class SpreadMaker(Protocol):
    """Makes what carries the change of recomputed rows over to others."""

    def __call__(self, rows: torch.Tensor, *, begin: int, end: int) -> Spreading:
        """``rows`` are computed again; others in ``[begin, end)`` may change along."""
        ...


Chooser = Callable[[int, torch.Tensor, KVChanges | None], torch.Tensor | None]
"""Called before each layer with its index, the rows [n] that reach it and what the layer before changed in
them; returns which of them go on (indices into the rows, ascending), or None for all."""


@dataclass
class _Pass:
    """One forward over rows, as the hooks see it."""

    cache: SlabCache
    rows: torch.Tensor  # [n] positions still running
    choose: Chooser | None
    make_spread: Callable[[torch.Tensor], Spreading] | None
    kept: torch.Tensor | None = None  # [n] indices into the rows the forward began with
    sliced: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    layer_rows: int = 0
    """Rows computed so far, summed over layers."""

    def spread_of(self, rows: torch.Tensor) -> Spreading | None:
        """What carries the change of these rows over to others, if that was asked for."""
        return self.make_spread(rows) if self.make_spread is not None else None


class RecomputeRunner:
    """Row-wise forward passes of one model. ``close`` takes its hooks off the model again."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._model = runner.model
        self._active = threading.local()
        self._layers = decoder_layers(runner.model)
        self._windows = attention_windows(runner.model)
        hooks = [
            layer.register_forward_pre_hook(_narrowing_hook(index, self._active), with_kwargs=True)
            for index, layer in enumerate(self._layers)
        ]
        self._take_off = weakref.finalize(self, _remove, hooks)  # also for an engine nobody closed

    @property
    def layer_count(self) -> int:
        """Decoder layers of the model."""
        return len(self._layers)

    def close(self) -> None:
        """Take the hooks off the model."""
        self._take_off()

    @torch.no_grad()
    def recompute_positions(
        self,
        token_ids: Sequence[int],
        cache: SlabCache,
        rows: Sequence[int] | torch.Tensor,
        *,
        logits: bool = True,
        choose: Chooser | None = None,
        watch: Sequence[int] = (),
        spread: SpreadMaker | None = None,
    ) -> tuple[torch.Tensor | None, int]:
        """Compute again the given rows of a sequence the cache already holds, in place.

        ``token_ids`` is that whole sequence, ``rows`` ascending positions in it; layers in ``watch`` note
        what they change; ``spread`` makes what carries that over to other rows. Returns the logits of the
        last row, [vocab], if asked, and how many rows were computed, summed over layers. More than a few
        thousand rows run in several forwards, first rows first.
        """
        length = cache.get_seq_length()
        if len(token_ids) != length:
            raise ValueError(f"the cache holds {length} rows, the sequence has {len(token_ids)} tokens")
        device = self._runner.device
        positions = torch.as_tensor(rows, device=device)
        ids = torch.as_tensor(token_ids, device=device)
        last: torch.Tensor | None = None
        layer_rows = 0
        parts = torch.split(positions, _MAX_ROWS)
        for index, part in enumerate(parts):
            begin = int(part[0]) if index else 0
            end = int(parts[index + 1][0]) if index + 1 < len(parts) else length
            running = _Pass(cache, part, choose, partial(spread, begin=begin, end=end) if spread else None)
            rewriting = cache.rewriting(part, watch=watch, spread=running.spread_of(part))
            with self._running(running), rewriting, BlockedAttention(running):
                last = self._runner.run(
                    ids[part].view(1, -1),
                    cache,
                    logits=logits,
                    attention_mask=self._masks(part, length),
                    position_ids=part.view(1, -1),
                )
            layer_rows += running.layer_rows
        return last, layer_rows

    @torch.no_grad()
    def attention_to(
        self, token_ids: Sequence[int], cache: SlabCache, *, known: torch.Tensor, layers: range, ahead: int = 0
    ) -> torch.Tensor:
        """Which share of the last tokens' attention goes to each row before them: [layers, rows], over all heads.

        ``token_ids`` stand ``ahead`` positions behind what the cache holds; of its rows they see those marked in
        ``known`` [rows], and each other. Runs up to the last of ``layers``; the cache keeps its length.
        """
        start, count = cache.get_seq_length(), len(token_ids)
        device = self._runner.device
        positions = torch.arange(start, start + count, device=device)
        mask = self._masks(positions, start + count, known=known.to(device))
        tap = AttentionTap(layers, rows=start, keys=start + count)
        try:
            with tap:
                self._runner.run(
                    torch.as_tensor(token_ids, device=device).view(1, -1),
                    cache,
                    logits=False,
                    attention_mask=mask,
                    position_ids=positions.view(1, -1) + ahead,
                )
        except SeenEnough:
            pass  # the layers behind the last one asked for need not run
        finally:
            cache.set_length(start)
        if len(tap.seen) != len(layers):
            raise UnsupportedModelError(
                f"the attention of {self._model.config._attn_implementation!r} cannot be watched; load the model with "
                "attn_implementation='sdpa' or choose a repair strategy that needs no attention"
            )
        return torch.stack(tap.seen)

    def _masks(self, positions: torch.Tensor, length: int, *, known: torch.Tensor | None = None) -> Any:
        """What each row may see: [1, 1, rows, length], or one such mask per kind of layer."""
        keys = torch.arange(length, device=positions.device)
        visible = keys <= positions.view(-1, 1)
        if known is not None:
            visible[:, : len(known)] &= known
        masks = {}
        for kind, window in self._windows.items():
            seen = visible if window is None else visible & (keys > positions.view(-1, 1) - window)
            masks[kind] = self._as_model_wants(seen.view(1, 1, *seen.shape))
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _as_model_wants(self, mask: torch.Tensor) -> torch.Tensor:
        if self._model.config._attn_implementation == "sdpa":
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
        changed = running.cache.layers[index - 1].changes if index else None
        chosen = running.choose(index, running.rows, changed) if running.choose else None
        if chosen is not None:
            running.rows = running.rows[chosen]
            running.kept = chosen if running.kept is None else running.kept[chosen]
            running.sliced.clear()
            running.cache.narrow(running.rows, from_layer=index, spread=running.spread_of(running.rows))
            if args:
                args = (args[0][:, chosen], *args[1:])
            else:
                kwargs = {**kwargs, "hidden_states": kwargs["hidden_states"][:, chosen]}
        running.layer_rows += len(running.rows)
        if running.kept is None:
            return None
        return args, {name: _slice(name, value, running) for name, value in kwargs.items()}

    return before_layer


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def probe_recompute(runner: ModelRunner, layout: KVLayout, *, attention_layers: range) -> RecomputeRunner:
    """A row runner for this model, once it has shown that its rows may be recomputed, dropped and watched.

    Raises UnsupportedModelError with the reason where they may not.
    """
    rows = RecomputeRunner(runner)
    config = runner.model.config.get_text_config(decoder=True)
    tokens = (torch.arange(_PROBE_TOKENS) * 7919 % min(config.vocab_size, 30_000)).tolist()
    cache = SlabCache(layout, capacity=_PROBE_TOKENS)
    whole = runner.append(tokens, cache, logits=True)
    middle = rows.layer_count // 2

    def drop_one(layer: int, positions: torch.Tensor, changes: KVChanges | None) -> torch.Tensor | None:
        return torch.tensor([1, 2], device=positions.device) if layer == middle else None

    try:
        again, seen = rows.recompute_positions(tokens, cache, [3, 7, _PROBE_TOKENS - 1], choose=drop_one)
        if seen != 3 * middle + 2 * (rows.layer_count - middle):
            raise UnsupportedModelError(f"{config.model_type} does not run its decoder layers one after another")
        if attention_layers:
            cache.set_length(_PROBE_TOKENS - 2)
            known = torch.ones(_PROBE_TOKENS - 2, dtype=torch.bool)
            rows.attention_to(tokens[-2:], cache, known=known, layers=attention_layers)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        rows.close()
        raise UnsupportedModelError(f"{config.model_type} cannot compute single rows again ({error})") from error
    except UnsupportedModelError:
        rows.close()
        raise
    assert whole is not None
    assert again is not None
    compare_logits(config, whole, again, "a few of its rows are computed again", remedy=_EXACT_GOES_ON)
    return rows


# Where the rows stand in what a decoder layer is given beside its hidden states.
_ROW_DIMENSION = {"attention_mask": -2, "position_embeddings": -2, "position_ids": -1}


def _slice(name: str, value: Any, running: _Pass) -> Any:
    """A layer's argument with only the rows still running. The model passes the same objects to every layer."""
    if name not in _ROW_DIMENSION or value is None:
        return value
    whole, part = running.sliced.get(id(value), (None, None))
    if whole is not value:
        dim, kept = _ROW_DIMENSION[name], running.kept
        part = (
            tuple(piece.index_select(dim, kept) for piece in value)
            if isinstance(value, tuple)
            else value.index_select(dim, kept)
        )
        running.sliced[id(value)] = (value, part)  # kept alive, so that its id is nobody else's
    return part
