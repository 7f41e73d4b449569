"""Attention whose rows do not depend on where a step began: Transformers' ``sdpa``, on keys padded to fixed lengths.

Registered with Transformers under :data:`NAME`, with its mask function. Outside a step of ours (:func:`attending`) both
are ``sdpa`` itself, so the model's own users see no difference. Within a step they run torch's flash kernel so that
the bits of a row depend on its own query and on the keys up to it alone:

- The kernel takes keys in blocks from position 0 on, and only the length of the last block changes how its sums are
  split. So keys and values are padded to a multiple of ``granule``; the cache holds zeros there.
- A query's place among others does not matter in calls of at least a block's rows, so queries are padded to 32.
- Keys that a mask hides add exact zeros. So a step that begins at 0 runs the causal kernel, as plain Transformers
  does, and a later one the masked kernel, with equal bits.

A later step of many rows runs in calls over the keys up to each one's last row. Its queries are turned around: then
the causal mask has equal numbers wherever row + key are equal, and is a view of one vector instead of a matrix that
every head reads again. Where rows are few, the queries of one KV head are folded into rows, which fills whole blocks.
In a step of several sequences (:class:`JointStep`) each has attention calls of its own, as it would have alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

NAME = "kvboost_sdpa"
_QUERY_BLOCK = 32  # rows; the smallest block of the flash kernel
_FEW_ROWS = 64  # below it, folding heads into rows saves more padding than a mask costs
# Of a later step: fewer rows compute less beyond the diagonal, but from 768 on the kernel's blocks are large.
_CALL_ROWS = 1024
_MAX_FOLDED = 1 << 22  # elements of a mask repeated for folded heads; above it, repeating the keys is cheaper
_KEPT_BIASES = 2  # models have at most two kinds of layers: with a window and without
_PLAIN_ONLY = ("softcap", "s_aux", "position_bias", "head_mask")


class UnsupportedAttentionError(Exception):
    """The model's attention needs more than a mask."""


@dataclass
class Step:
    """One forward of one sequence over a cache whose layers have padded storage."""

    cache: Any
    start: int
    """Positions that the cache holds before the step."""
    padded: int
    """Keys that attention sees, a multiple of the granule: the sequence with this step, then zeros."""
    granule: int
    causal: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    """Stands for the causal mask of a later step of many rows: the model only hands it on."""
    biases: list[tuple[torch.Tensor, int, torch.Tensor]] = field(default_factory=list)
    """The last masks seen, as (mask, folded heads, numbers to add): layers with and without a window alternate."""
    calls: int = 0
    """Attention calls so far."""


@dataclass
class JointStep:
    """One forward of several sequences, whose rows lie one behind the other."""

    parts: list[Step]
    rows: list[int]
    """Rows of each."""
    masks: list[tuple[torch.Tensor, list[torch.Tensor | None]]] = field(default_factory=list)
    """What the model was given as a mask, and what it stands for: a mask for each sequence."""

    def masks_behind(self, given: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The masks of the sequences that a layer's mask stands for."""
        if given is None:
            return [None] * len(self.parts)
        for known, masks in self.masks:
            if known is given:
                return masks
        raise UnsupportedAttentionError("it changes its mask")


class _Active(threading.local):
    step: Step | JointStep | None = None


_active = _Active()


@contextmanager
def attending(step: Step | JointStep) -> Iterator[None]:
    """Within this block the model's attention in this thread belongs to ``step``."""
    before = _active.step
    _active.step = step
    try:
        yield
    finally:
        _active.step = before


_lent: WeakKeyDictionary[Any, tuple[str, int]] = WeakKeyDictionary()
"""The attention that a model had, and how many engines use ours on it."""
_lending = threading.Lock()


def lend(model: Any) -> None:
    """Let a model use this attention until :func:`take_back` was called as often."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    with _lending:
        before, users = _lent.get(model, (model.config._attn_implementation, 0))
        _lent[model] = before, users + 1
        model.set_attn_implementation(NAME)


def own_attention(model: Any) -> str:
    """The attention that a model has without us."""
    with _lending:
        return _lent.get(model, (str(model.config._attn_implementation), 0))[0]


def take_back(model: Any) -> None:
    """Undo :func:`lend`; the last one gives a model its own attention again."""
    with _lending:
        before, users = _lent.pop(model)
        if users > 1:
            _lent[model] = before, users - 1
        else:
            model.set_attn_implementation(before)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of Transformers' ``sdpa``; within a step over the padded keys, and none from position 0 on."""
    step = _active.step
    if step is None:
        return sdpa_mask(  # type: ignore[no-any-return]
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs
        )
    kwargs |= {"allow_is_causal_skip": False}

    def mask_of(part: Step, rows: int, start: int) -> torch.Tensor | None:
        if mask_function is causal_mask_function and start == 0:
            return None
        if mask_function is causal_mask_function and start == part.start and rows >= _FEW_ROWS:
            return part.causal
        # Without the 2-D mask: a single sequence has no padding, and behind its end causality hides all keys.
        allowed = sdpa_mask(batch_size, rows, part.padded, start, kv_offset, mask_function, None, **kwargs)
        assert allowed is not None
        return allowed  # type: ignore[no-any-return]

    if isinstance(step, Step):
        return mask_of(step, q_length, int(q_offset))
    masks = [mask_of(part, rows, part.start) for part, rows in zip(step.parts, step.rows, strict=True)]
    if all(one is None for one in masks):
        return None
    stand_in = torch.empty(0, dtype=torch.bool)  # the model only hands it on
    step.masks.append((stand_in, masks))
    return stand_in


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of [1, heads, rows, dim] queries; ``sdpa`` itself outside a step."""
    step = _active.step
    if step is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    for name in _PLAIN_ONLY:
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"its attention has {name}")
    layer, scale = module.layer_idx, kwargs.get("scaling")
    assert isinstance(layer, int)
    if isinstance(step, Step):
        return _attend(step, layer, query, attention_mask, scale).transpose(1, 2).contiguous(), None
    pieces = zip(step.parts, torch.split(query, step.rows, dim=2), step.masks_behind(attention_mask), strict=True)
    results = [_attend(part, layer, rows, allowed, scale) for part, rows, allowed in pieces]
    return torch.cat(results, dim=2).transpose(1, 2).contiguous(), None


def _attend(
    step: Step, layer: int, query: torch.Tensor, allowed: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """One sequence's attention in one layer, [1, heads, rows, dim]."""
    if allowed is not None and allowed.dtype != torch.bool:
        raise UnsupportedAttentionError("its mask has numbers to add")
    step.calls += 1
    cached = step.cache.layers[layer]
    key, value = cached.key_store[:, :, : step.padded], cached.value_store[:, :, : step.padded]
    if allowed is None:
        return flash(_to_blocks(query), key, value, None, scale)[:, :, : query.shape[2]]
    if allowed is step.causal:
        return _behind(step, query, key, value, scale)
    if not allowed.numel():
        raise UnsupportedAttentionError("it changes its mask")
    return _masked(step, query, key, value, allowed, scale)


def _behind(
    step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention of many rows behind a prefix, each row over the keys up to it."""
    heads, rows = query.shape[1:3]
    most = max(_CALL_ROWS, _CALL_ROWS * torch.get_num_threads() // heads)  # work for every thread
    results = []
    for first in range(0, rows, most):
        count = min(most, rows - first)
        turned = _to_blocks(query[:, :, first : first + count]).flip(2)
        keys = -(-(step.start + first + count) // step.granule) * step.granule
        # Row i of the turned ones is row ``blocks - 1 - i``, so key j is hidden from it if i + j reaches ``hidden``.
        blocks = turned.shape[2]
        hidden = step.start + first + blocks
        numbers = query.new_zeros(blocks + keys)
        numbers[hidden:] = -torch.inf
        bias = numbers.as_strided((1, 1, blocks, keys), (0, 0, 1, 1))
        result = flash(turned, key[:, :, :keys], value[:, :, :keys], bias, scale)
        results.append(result.flip(2)[:, :, :count])
    return torch.cat(results, dim=2) if len(results) > 1 else results[0]


def _masked(
    step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention under a mask [1, 1, rows, keys]."""
    (_, heads, rows, dim), kv_heads = query.shape, key.shape[1]
    group = heads // kv_heads
    if group * rows * key.shape[2] > _MAX_FOLDED:
        bias = _bias(step, allowed, 1, query.dtype)
        return flash(_to_blocks(query), key, value, bias, scale)[:, :, :rows]
    bias = _bias(step, allowed, group, query.dtype)
    folded = _to_blocks(query.reshape(1, kv_heads, group * rows, dim))
    result = flash(folded, key, value, bias, scale)
    return result[:, :, : group * rows].reshape(1, heads, rows, dim)


def flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """torch's flash kernel, causal without a bias.

    Called by its own name: torch chooses a kernel by settings of the whole process, which other threads, and keys,
    depend on.
    """
    result, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, bias is None, attn_mask=bias, scale=scale
    )
    return result  # type: ignore[no-any-return]


def _bias(step: Step, allowed: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask as numbers to add, for ``group`` heads folded into rows, padded to whole blocks of queries."""
    for known, folded, bias in step.biases:
        if known is allowed and folded == group:
            return bias
    rows, hidden = allowed.shape[-2], allowed.logical_not()
    padded = -(-group * rows // _QUERY_BLOCK) * _QUERY_BLOCK
    bias = torch.zeros(1, 1, padded, allowed.shape[-1], dtype=dtype, device=allowed.device)
    for head in range(group):
        bias[:, :, head * rows : (head + 1) * rows].masked_fill_(hidden, float("-inf"))
    step.biases = [*step.biases[1 - _KEPT_BIASES :], (allowed, group, bias)]
    return bias


def _to_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., rows, dim] padded with zeros to whole blocks."""
    missing = -rows.shape[-2] % _QUERY_BLOCK
    return pad(rows, (0, 0, 0, missing)) if missing else rows
