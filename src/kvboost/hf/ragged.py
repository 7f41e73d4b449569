"""Decodes several sequences of any lengths in one forward, each over its own cache: no padding, no copies.

Called by the batch runner. Projections run over the whole batch; attention runs per sequence over its own cache, and
once for a prefix that several sequences share. Invariant: every sequence gets the result it would get alone, up to
rounding; after a failed step every cache has its previous length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache, DynamicLayer

from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVLayout, SlabCache
from kvboost.hf.layers import windows_by_layer
from kvboost.hf.probe import compare_logits
from kvboost.hf.runner import ModelRunner

_PROBE_LENGTHS = (7, 12, 12)
_PROBE_SHARED = 5
_ONE_BY_ONE = "Its sequences are decoded one after another."
_MIN_SAVED = 2048  # tokens; below that merging two attentions costs more than it saves


@dataclass(frozen=True)
class SharedPrefix:
    """Sequences whose first tokens have the same KV."""

    members: tuple[int, ...]
    """Their indices in the batch."""
    tokens: int


class _RaggedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """One layer of the whole batch: new KV goes to each sequence's own cache."""

    def __init__(self, index: int, step: _Step) -> None:
        super().__init__()
        self._index, self._step = index, step
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one new token of every sequence, [batch, heads, 1, dim]; :class:`_Step` attends to the cached ones."""
        self._step.take(self._index, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Zero, so that no mask is made; the caller passes position ids."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The sizes of what :meth:`update` returns."""
        return query_length, 0


class _Step(TorchFunctionMode):
    """One decode step: every sequence's KV, layer by layer, and the attention over it."""

    def __init__(self, caches: Sequence[Any], windows: Sequence[int | None], shared: Sequence[SharedPrefix]) -> None:
        super().__init__()
        self._windows = windows
        self._lengths = [cache.get_seq_length() for cache in caches]
        self._kv = [_slots(cache, 0, length + 1) for cache, length in zip(caches, self._lengths, strict=True)]
        self._new = [_slots(cache, length, length + 1) for cache, length in zip(caches, self._lengths, strict=True)]
        self._shared = shared
        self._layer: int | None = None
        self.attended = 0

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one new token of every sequence."""
        for slot, states in ((2 * layer, keys), (2 * layer + 1, values)):
            torch._foreach_copy_(
                [new[slot] for new in self._new], [states[index : index + 1] for index in range(len(self._new))]
            )
        self._layer = layer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention or self._layer is None:
            return func(*args, **kwargs)
        if kwargs.get("attn_mask") is not None or kwargs.get("dropout_p") or len(args) != 3:
            raise UnsupportedModelError(f"its attention needs a mask for single tokens. {_ONE_BY_ONE}")
        layer, self._layer = self._layer, None
        self.attended += 1
        return self._attend(layer, args[0], kwargs.get("scale"))

    def _attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """[batch, heads, 1, dim]. Heads that share keys become rows of one query, so no key is repeated."""
        batch, heads, _, dim = query.shape
        key_heads = self._kv[0][2 * layer].shape[1]
        grouped = query.view(batch, key_heads, heads // key_heads, dim)
        outputs: list[torch.Tensor | None] = [None] * batch
        window = self._windows[layer]
        for prefix in self._shared:
            if window is None:
                self._attend_shared(layer, prefix, grouped, scale, outputs)
        for index, kv in enumerate(self._kv):
            if outputs[index] is None:
                first = 0 if window is None else max(0, self._lengths[index] + 1 - window)
                keys, values = kv[2 * layer][:, :, first:], kv[2 * layer + 1][:, :, first:]
                outputs[index] = torch.nn.functional.scaled_dot_product_attention(
                    grouped[index : index + 1], keys, values, scale=scale
                )
        return torch.cat([out for out in outputs if out is not None]).view(batch, heads, 1, -1)

    def _attend_shared(
        self,
        layer: int,
        prefix: SharedPrefix,
        grouped: torch.Tensor,
        scale: float | None,
        outputs: list[torch.Tensor | None],
    ) -> None:
        """Attend once to the shared prefix, then each sequence to its own rest, and merge the two by log-sum-exp."""
        members = list(prefix.members)
        _, key_heads, group, dim = grouped.shape
        together = grouped[members].transpose(0, 1).reshape(1, key_heads, len(members) * group, dim)
        first = self._kv[members[0]]
        head, head_weight = _attend_with_lse(
            together, first[2 * layer][:, :, : prefix.tokens], first[2 * layer + 1][:, :, : prefix.tokens], scale
        )
        own = [
            _attend_with_lse(
                grouped[index : index + 1],
                self._kv[index][2 * layer][:, :, prefix.tokens :],
                self._kv[index][2 * layer + 1][:, :, prefix.tokens :],
                scale,
            )
            for index in members
        ]
        tails, tail_weights = torch.cat([out for out, _ in own]), torch.cat([weight for _, weight in own])
        heads = head.view(key_heads, len(members), group, -1).transpose(0, 1)
        head_weights = head_weight.view(key_heads, len(members), group).transpose(0, 1)
        share = torch.sigmoid(tail_weights - head_weights).unsqueeze(-1).to(tails.dtype)
        for index, out in zip(members, torch.lerp(heads, tails, share).unsqueeze(1), strict=True):
            outputs[index] = out


def _attend_with_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of the sum it was divided by, [1, heads, queries]."""
    out, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, scale=scale)
    return out, weight.view(query.shape[0], query.shape[1], query.shape[2])


def _slots(cache: SlabCache, start: int, end: int) -> list[torch.Tensor]:
    """Views of positions ``[start, end)``, [1, heads, tokens, dim] for every slot of the layout."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(cache.layout.slots)
    for slab, slots in zip(cache.slabs, cache.layout.groups.values(), strict=True):
        for slot, view in zip(slots, slab[:, :, :, start:end].unbind(0), strict=True):
            found[slot] = view
    return found


class RaggedRunner:
    """Joint decode steps of one model. Make it with :func:`probe_ragged`, which tests that the model supports them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._windows = windows_by_layer(runner.model)

    @torch.no_grad()
    def decode(
        self, tokens: Sequence[int], caches: Sequence[Any], *, shared: Sequence[SharedPrefix] = ()
    ) -> torch.Tensor:
        """Compute one more token of every sequence behind its own cache. Returns their logits [batch, vocab].

        Every cache needs capacity for one more token. ``shared`` lists sequences with a common prefix.
        """
        lengths = [cache.get_seq_length() for cache in caches]
        if any(
            not cache.is_poolable or cache.capacity <= length for cache, length in zip(caches, lengths, strict=True)
        ):
            raise ValueError("a joint step needs caches with capacity for one more token")
        worthwhile = [prefix for prefix in shared if prefix.tokens * (len(prefix.members) - 1) >= _MIN_SAVED]
        step = _Step(caches, self._windows, worthwhile if self._runner.device.type == "cpu" else ())
        batch = Cache(layers=[_RaggedLayer(index, step) for index in range(len(self._windows))])
        device = self._runner.device
        with step:
            logits = self._runner.run_batch(
                torch.tensor(tokens, device=device).view(-1, 1),
                batch,
                position_ids=torch.tensor(lengths, device=device).view(-1, 1),
            )
        if step.attended != len(self._windows):
            raise UnsupportedModelError(f"not all its layers attend through torch's own kernel. {_ONE_BY_ONE}")
        for cache, length in zip(caches, lengths, strict=True):
            cache.set_length(length + 1)
        return logits


@torch.no_grad()
def probe_ragged(runner: ModelRunner, layout: KVLayout) -> RaggedRunner:
    """A runner of joint steps, after testing that they give the results of single ones.

    Raises UnsupportedModelError with the reason if they do not.
    """
    config = runner.model.config.get_text_config(decoder=True)
    ragged = RaggedRunner(runner)
    vocab = min(config.vocab_size, 30_000)
    caches, alone, tokens = [], [], []
    for number, length in enumerate(_PROBE_LENGTHS):
        ids = [(i * 7919 + (number if i >= _PROBE_SHARED else 0)) % vocab for i in range(length + 1)]
        cache = SlabCache(layout, capacity=length + 1)
        runner.append(ids[:length], cache, logits=False)
        single = runner.append(ids[length:], cache, logits=True)
        assert single is not None
        cache.set_length(length)
        caches.append(cache)
        alone.append(single)
        tokens.append(ids[length])
    try:
        together = ragged.decode(tokens, caches)
    except UnsupportedModelError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UnsupportedModelError(f"{config.model_type} cannot decode sequences together ({error})") from error
    for single, joint in zip(alone, together, strict=True):
        compare_logits(config, single, joint, "several sequences are decoded together", remedy=_ONE_BY_ONE)
    return ragged
