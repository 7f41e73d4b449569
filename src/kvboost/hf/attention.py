"""The one place where our attention meets Transformers': ``sdpa``, or what this thread's :class:`Plan` does instead.

Registered with Transformers in the place of ``sdpa``, with its mask function, by the first :func:`attending`. Without
a plan, and in code that torch compiles, both are ``sdpa`` itself. Here are the plans of steps. Joint decoding
(:mod:`kvboost.hf.ragged`), repairs (:mod:`kvboost.approx.attention`) and paging (:mod:`kvboost.offload.kv.cache`) have
plans of their own.

Within a step torch's flash kernel runs so that the bits of a row depend on its query and on the keys up to it alone:

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

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

NAME = "sdpa"
"""The attention that plans are for."""
_QUERY_BLOCK = 32  # rows; the smallest block of the flash kernel
_FEW_ROWS = 64  # below it, folding heads into rows saves more padding than a mask costs
# Of a later step: fewer rows compute less beyond the diagonal, but from 768 on the kernel's blocks are large.
_CALL_ROWS = 1024
_MAX_FOLDED = 1 << 22  # elements of a mask repeated for folded heads; above it, repeating the keys is cheaper
_KEPT_BIASES = 2  # models have at most two kinds of layers: with a window and without
_MASK_ARGUMENTS = tuple(inspect.signature(sdpa_mask).parameters)
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
"""What plans without a mask may be for, too."""
_PLAIN_ONLY = ("softcap", "s_aux", "position_bias", "head_mask")


class UnsupportedAttentionError(Exception):
    """The model's attention needs more than a mask."""


@dataclass(frozen=True)
class Call:
    """What Transformers asks for: one layer's attention of queries [batch, heads, rows, dim]."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]
    plain: Callable[[], torch.Tensor]
    """What ``sdpa`` gives, [batch, rows, heads, dim]."""

    @property
    def scale(self) -> float | None:
        """What products of queries and keys are multiplied with; None is the kernel's own choice."""
        return self.options.get("scaling")

    @property
    def more_than_a_mask(self) -> str | None:
        """What it has beside its mask, by name; None for plain attention."""
        return next((name for name in _PLAIN_ONLY if self.options.get(name) is not None), None)


class Plan:
    """What the attention of one forward does. This one does what ``sdpa`` does."""

    def mask(self, **asked: Any) -> torch.Tensor | None:
        """The mask that layers are given; the arguments are those of Transformers' mask functions."""
        return sdpa_mask(**asked)  # type: ignore[no-any-return]

    def attend(self, call: Call) -> torch.Tensor:
        """One layer's attention, [batch, rows, heads, dim]."""
        return call.plain()


class _Active(threading.local):
    plan: Plan | None = None
    of: str = NAME


_active = _Active()


@contextmanager
def attending(plan: Plan, *, of: str = NAME) -> Iterator[None]:
    """Within this block the attention of models in this thread follows ``plan``, where it is called ``of``.

    Only ``sdpa`` asks a plan for masks; the flash kernels have none.
    Where a model does not use Transformers' interface, or somebody registered an attention or a mask of their own,
    nothing follows it; who must be followed checks it.
    """
    before = _active.plan, _active.of
    _active.plan, _active.of = plan if _is_registered(of) else None, of
    try:
        yield
    finally:
        _active.plan, _active.of = before


def _is_registered(name: str) -> bool:
    """Whether ours are registered with Transformers; in the place of its own they are, for the life of the process."""
    if name in _FLASH:
        if AttentionInterface().get(name) is flash_attention_forward:
            AttentionInterface.register(name, flash_attention)
        return AttentionInterface().get(name) is flash_attention
    found = AttentionInterface().get(NAME), AttentionMaskInterface().get(NAME)
    if found == (sdpa_attention_forward, sdpa_mask):
        AttentionMaskInterface.register(NAME, mask)
        AttentionInterface.register(NAME, attention)
        return True
    return found == (attention, mask)


def _follow(plan: Plan, call: Call) -> torch.Tensor:
    """What the plan gives. What it calls itself is not asked of it again."""
    _active.plan = None
    try:
        return plan.attend(call)
    finally:
        _active.plan = plan


def registered(name: str) -> tuple[Any, ...]:
    """The attention that is registered with Transformers under this name, and its mask.

    Transformers' own for ours, which is registered during the first request: the model is the same as before.
    """
    found = (interface().get(name) for interface in (AttentionInterface, AttentionMaskInterface))
    own = {attention: sdpa_attention_forward, flash_attention: flash_attention_forward, mask: sdpa_mask}
    return tuple(own.get(function, function) for function in found if function is not None)


def mask(*by_position: Any, **asked: Any) -> torch.Tensor | None:
    """What is registered with Transformers for making masks."""
    # Dynamo knows the answer, so that a compiled model is compiled as without us.
    plan = None if torch.compiler.is_dynamo_compiling() or _active.of != NAME else _active.plan
    if plan is None:
        return sdpa_mask(*by_position, **asked)  # type: ignore[no-any-return]
    return plan.mask(**dict(zip(_MASK_ARGUMENTS, by_position, strict=False)), **asked)


def _following(own: Callable[..., Any], *names: str) -> Callable[..., tuple[torch.Tensor, None]]:
    """What is registered with Transformers for attention in the place of ``own``, under these names."""
    options = tuple(inspect.signature(own).parameters)[5:]

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *by_position: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        plan = None if torch.compiler.is_dynamo_compiling() or _active.of not in names else _active.plan
        if plan is None:
            return own(module, query, key, value, attention_mask, *by_position, **kwargs)  # type: ignore[no-any-return]
        kwargs = {**dict(zip(options, by_position, strict=False)), **kwargs}
        plain = partial(own, module, query, key, value, attention_mask, **kwargs)
        return _follow(plan, Call(module, query, key, value, attention_mask, kwargs, lambda: plain()[0])), None

    return attention


attention = _following(sdpa_attention_forward, NAME)
flash_attention = _following(flash_attention_forward, *_FLASH)


@dataclass
class Step(Plan):
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

    def mask(self, **asked: Any) -> torch.Tensor | None:
        """A mask over the padded keys, and none from position 0 on."""
        start, causal = int(asked["q_offset"]), asked["mask_function"] is causal_mask_function
        if causal and start == 0:
            return None
        if causal and start == self.start and asked["q_length"] >= _FEW_ROWS:
            return self.causal
        # Without the 2-D mask: a single sequence has no padding, and after its end causality hides all keys.
        changes = {"kv_length": self.padded, "q_offset": start, "attention_mask": None, "allow_is_causal_skip": False}
        allowed = sdpa_mask(**asked | changes)
        assert allowed is not None
        return allowed  # type: ignore[no-any-return]

    def attend(self, call: Call) -> torch.Tensor:
        """Attention to the keys in the cache, whose storage goes on after those that are given."""
        return _attend(self, layer_of(call), call.query, call.mask, call.scale).transpose(1, 2).contiguous()


@dataclass
class JointStep(Plan):
    """One forward of several sequences, whose rows lie one after the other."""

    parts: list[Step]
    rows: list[int]
    """Rows of each."""
    masks: list[tuple[torch.Tensor, list[torch.Tensor | None]]] = field(default_factory=list)
    """What the model was given as a mask, and what it stands for: a mask for each sequence."""

    @property
    def calls(self) -> int:
        """Attention calls of the sequence that had the fewest."""
        return min(part.calls for part in self.parts)

    def mask(self, **asked: Any) -> torch.Tensor | None:
        """Something that stands for a mask of each sequence; none if no sequence has one."""
        each = zip(self.parts, self.rows, strict=True)
        masks = [part.mask(**asked | {"q_length": rows, "q_offset": part.start}) for part, rows in each]
        if all(one is None for one in masks):
            return None
        stand_in = torch.empty(0, dtype=torch.bool)  # the model only hands it on
        self.masks.append((stand_in, masks))
        return stand_in

    def attend(self, call: Call) -> torch.Tensor:
        """Attention of each sequence to its own cache."""
        layer = layer_of(call)
        pieces = zip(self.parts, torch.split(call.query, self.rows, dim=2), self.masks_for(call.mask), strict=True)
        results = [_attend(part, layer, rows, allowed, call.scale) for part, rows, allowed in pieces]
        return torch.cat(results, dim=2).transpose(1, 2).contiguous()

    def masks_for(self, given: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The masks of the sequences that a layer's mask stands for."""
        if given is None:
            return [None] * len(self.parts)
        for known, masks in self.masks:
            if known is given:
                return masks
        raise UnsupportedAttentionError("it changes its mask")


class SharedStep(JointStep):
    """The same of texts and of sequences after them: each is written over the one before when its turn comes."""

    def attend(self, call: Call) -> torch.Tensor:
        """Attention of each to itself and to what its cache held before the step, of a sequence to its text too."""
        layer, results = layer_of(call), []
        new = (torch.split(states, self.rows, dim=2) for states in (call.query, call.key, call.value))
        for part, (query, key, value), allowed in zip(
            self.parts, zip(*new, strict=True), self.masks_for(call.mask), strict=True
        ):
            cached = part.cache.layers[layer]
            cached.set_length(part.start)
            cached.update(key, value)
            results.append(_attend(part, layer, query, allowed, call.scale))
        return torch.cat(results, dim=2).transpose(1, 2).contiguous()


def layer_of(call: Call) -> int:
    """Which layer attends. Raises UnsupportedAttentionError where it needs more than a mask."""
    if name := call.more_than_a_mask:
        raise UnsupportedAttentionError(f"its attention has {name}")
    layer = getattr(call.module, "layer_idx", None)
    assert isinstance(layer, int)
    return layer


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
        return _after_prefix(step, query, key, value, scale)
    if allowed.shape[-1:] != (step.padded,):
        raise UnsupportedAttentionError("it changes its mask, or makes one of its own")
    return _masked(step, query, key, value, allowed, scale)


def _after_prefix(
    step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention of many rows after a prefix, each row over the keys up to it."""
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
