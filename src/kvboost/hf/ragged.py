"""Decodes several sequences of any lengths in one forward: a padded call for each group of similar lengths.

Called by the batch runner. Projections run over the whole batch, as weights times rows where that is faster. Attention
is one call of torch's kernel per layer and group, so the number of calls does not grow with the number of sequences;
nothing is copied to or from the device but the tokens and lengths of a step, once. Invariants: every sequence gets the
result it would get alone, up to rounding; two starts on one machine round alike; after a failed step every row has its
previous length.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvboost.errors import UnsupportedModelError
from kvboost.hf.attention import NAME, Call, Plan, attending
from kvboost.hf.cache import KVLayout, SlabCache
from kvboost.hf.cache_layers import StateLayer, StateSpec, StepLayer
from kvboost.hf.layers import windows_by_layer
from kvboost.hf.numerics.forwards import Forward, replaced, set_on
from kvboost.hf.packed_weights import is_packed
from kvboost.hf.peft_layers import walk
from kvboost.hf.probe import compare_logits
from kvboost.hf.row_pages import RowPages, has_kernel
from kvboost.hf.rows import RowBatch, RowGroup
from kvboost.hf.runner import ModelRunner

_PROBE_LENGTHS = (7, 12, 12)
_log = logging.getLogger(__name__)

_ONE_BY_ONE = "Its sequences are decoded one after another."
_MIN_SAVED = 2048  # tokens; below that merging two attentions costs more than it saves
_PAD_TO = 128  # positions; the kernel's sums then do not depend on how much of a row is masked
_EXCHANGED_ROWS = range(12, 49)
_EXCHANGED_OUTPUTS = 192
"""For so many rows, and weights of at least so many outputs, MKL multiplies faster with the two sides exchanged, in
float32 with AVX512 (docs/results/batched_decoding.md). Chosen by shape, never timed: two starts must round alike."""


@dataclass(frozen=True)
class SharedPrefix:
    """Sequences whose first tokens have the same KV."""

    members: tuple[int, ...]
    """Their indices in the batch."""
    tokens: int


class _RaggedLayer(StepLayer):
    """One layer of the whole batch: new KV goes to each sequence's row."""

    def __init__(self, index: int, step: _DecodeStep) -> None:
        super().__init__()
        self._index, self._step = index, step

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one new token of every sequence, [batch, heads, 1, dim]; the step attends to the cached ones."""
        self._step.write(self._index, key_states, value_states)
        return key_states, value_states


class _RaggedStateLayer(StateLayer, _RaggedLayer):
    """The same of a layer that has recurrent states beside its KV."""

    def __init__(self, index: int, step: _DecodeStep, specs: Sequence[StateSpec]) -> None:
        _RaggedLayer.__init__(self, index, step)
        StateLayer.__init__(self, specs)


class _GroupStep:
    """One group in a decode step: where its new KV goes, and what each sequence may see."""

    def __init__(
        self, group: RowGroup, begin: int, lengths: torch.Tensor, *, shared_tokens: int, in_pages: bool
    ) -> None:
        """``lengths`` [rows] is on the device of the token ids; ``shared_tokens`` are the same in all rows."""
        self._stores, self._shared_tokens = group.stores, shared_tokens
        self._capacity, self._in_pages = group.capacity, in_pages
        held = [row.get_seq_length() for row in group.rows]
        self._shortest, self._longest = min(held), max(held) + 1
        self._padded = min(-(-self._longest // _PAD_TO) * _PAD_TO, group.capacity)
        group.clear_up_to(self._padded)
        self.batch = slice(begin, begin + len(held))
        self._lengths = {lengths.device: lengths}
        self._rows: dict[torch.device, torch.Tensor] = {}
        self._biases: dict[tuple[torch.device, int | None], tuple[int, torch.Tensor]] = {}
        self._pages: dict[torch.device, RowPages] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one new token of every sequence, [batch, heads, 1, dim]."""
        lengths = self._lengths_on(keys.device)
        if keys.device not in self._rows:
            self._rows[keys.device] = torch.arange(len(lengths), device=keys.device)
        rows = self._rows[keys.device]
        self._stores[2 * layer][rows, :, lengths] = keys[self.batch, :, 0]
        self._stores[2 * layer + 1][rows, :, lengths] = values[self.batch, :, 0]

    def attend(self, layer: int, query: torch.Tensor, scale: float | None, window: int | None) -> torch.Tensor:
        """[rows, heads, 1, dim]. Heads that share keys become rows of one query, so no key is repeated."""
        keys, values = self._stores[2 * layer], self._stores[2 * layer + 1]
        if self._in_pages:
            return self._pages_on(keys.device).attend(query, keys, values, scale, window)
        rows, heads, _, dim = query.shape
        key_heads = keys.shape[1]
        grouped = query.reshape(rows, key_heads, heads // key_heads, dim)
        start, bias = self._bias(keys, window)
        if self._shared_tokens and window is None:
            out = self._attend_shared(grouped, keys[:rows], values[:rows], bias, scale)
        else:
            seen = slice(start, self._padded)
            out = torch.nn.functional.scaled_dot_product_attention(
                grouped, keys[:rows, :, seen], values[:rows, :, seen], attn_mask=bias, scale=scale
            )
        return out.reshape(rows, heads, 1, -1)

    def _attend_shared(
        self, grouped: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attend once to the shared prefix, then each sequence to its own rest, and merge the two by log-sum-exp."""
        rows, key_heads, group, dim = grouped.shape
        shared, rest = slice(0, self._shared_tokens), slice(self._shared_tokens, self._padded)
        together = grouped.transpose(0, 1).reshape(1, key_heads, rows * group, dim)
        head, head_weight = _attend_with_lse(together, keys[:1, :, shared], values[:1, :, shared], None, scale)
        tails, tail_weights = _attend_with_lse(grouped, keys[:, :, rest], values[:, :, rest], bias[..., rest], scale)
        heads = head.view(key_heads, rows, group, -1).transpose(0, 1)
        head_weights = head_weight.view(key_heads, rows, group).transpose(0, 1)
        share = torch.sigmoid(tail_weights - head_weights).unsqueeze(-1).to(tails.dtype)
        return torch.lerp(heads, tails, share)

    def _bias(self, keys: torch.Tensor, window: int | None) -> tuple[int, torch.Tensor]:
        """The first position any row sees, and 0 or -inf for each from there on, [rows, 1, 1, positions]."""
        known = self._biases.get((keys.device, window))
        if known is None:
            first = 0 if window is None else max(0, self._shortest + 1 - window) // _PAD_TO * _PAD_TO
            lengths = self._lengths_on(keys.device)[:, None]
            positions = torch.arange(first, self._padded, device=keys.device)
            hidden = positions > lengths
            if window is not None:
                hidden |= positions <= lengths - window
            bias = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
            known = self._biases[keys.device, window] = (first, bias[:, None, None])
        return known

    def _pages_on(self, device: torch.device) -> RowPages:
        if device not in self._pages:
            lengths = self._lengths_on(device)
            self._pages[device] = RowPages(lengths, longest=self._longest, capacity=self._capacity)
        return self._pages[device]

    def _lengths_on(self, device: torch.device) -> torch.Tensor:
        """Copied once per step to every device that has layers."""
        if device not in self._lengths:
            self._lengths[device] = next(iter(self._lengths.values())).to(device)
        return self._lengths[device]


class _DecodeStep(Plan):
    """One decode step: writes every sequence's KV, layer by layer, and attends to it where it lies."""

    def __init__(self, groups: Sequence[_GroupStep], windows: Sequence[int | None]) -> None:
        self._groups, self._windows = groups, windows
        self._written: int | None = None
        self.attended = 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one new token of every sequence."""
        for group in self._groups:
            group.write(layer, keys, values)
        self._written = layer

    def attend(self, call: Call) -> torch.Tensor:
        """Attention of one new token of every sequence to its row, [batch, 1, heads, dim]."""
        extra = call.mask is not None or call.options.get("dropout") or call.more_than_a_mask
        if extra or self._written is None:
            raise UnsupportedModelError(f"its attention needs a mask for single tokens. {_ONE_BY_ONE}")
        layer, self._written = self._written, None
        self.attended += 1
        outputs = [
            group.attend(layer, call.query[group.batch], call.scale, self._windows[layer]) for group in self._groups
        ]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).transpose(1, 2).contiguous()


def _batch_cache(batch: RowBatch, step: _DecodeStep) -> Cache:
    """The cache of one step over all sequences."""
    layout = batch.layout
    own = layout.states_by_layer
    with_kv = [
        _RaggedStateLayer(index, step, own[layer]) if layer in own else _RaggedLayer(index, step)
        for index, layer in enumerate(layout.with_kv)
    ]
    cache = Cache(layers=layout.layers_of(with_kv))
    # Copies, also of a single group's: a step that fails leaves every sequence the state it had.
    before = (torch.cat([group.used_states(i) for group in batch.groups]) for i in range(len(layout.states)))
    for layer, specs in own.items():
        cache.layers[layer].set_states(list(islice(before, len(specs))))
    return cache


def _keep_states(batch: RowBatch, cache: Cache) -> None:
    """Give every sequence its recurrent states after the step."""
    after = [tensor for layer in batch.layout.states_by_layer for tensor in cache.layers[layer].states()]
    for index, tensor in enumerate(after):
        parts = tensor.split([len(group.rows) for group in batch.groups])
        for group, part in zip(batch.groups, parts, strict=True):
            group.used_states(index).copy_(part)


def _attend_with_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of the sum it was divided by, [batch, heads, queries]."""
    out, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=bias, scale=scale
    )
    return out, weight.view(query.shape[:3])


def gains_exchanged(weight: torch.Tensor) -> bool:
    """Whether few rows are multiplied faster by :func:`exchanged` with weights of this shape and type."""
    plain = weight.dtype is torch.float32 and weight.device.type == "cpu" and not is_packed(weight)
    return plain and weight.dim() == 2 and weight.shape[0] >= _EXCHANGED_OUTPUTS


def exchanged(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear(rows, weight, bias)`` of [..., inputs] as weights times rows: the same up to rounding."""
    flat = rows.reshape(-1, rows.shape[-1]).t()
    product = torch.mm(weight, flat) if bias is None else torch.addmm(bias[:, None], weight, flat)
    return product.t().contiguous().view(*rows.shape[:-1], -1)


def _exchanging(model: torch.nn.Module) -> list[tuple[torch.nn.Module, Forward]]:
    """The linear layers that may gain by it, and for each a forward that exchanges its sides."""

    def forward_of(module: Any) -> Forward:
        def forward(rows: torch.Tensor) -> Any:
            if gains_exchanged(module.weight):  # asked here: a streamed layer has its weights only while it runs
                return exchanged(rows, module.weight, module.bias)
            return module.forward(rows)

        return forward

    linear = (module for module in walk(model) if type(module) is torch.nn.Linear and set_on(module) is None)
    return [(module, forward_of(module)) for module in linear if module.out_features >= _EXCHANGED_OUTPUTS]


class RaggedRunner:
    """Joint decode steps of one model. Make it with :func:`probe_ragged`, which tests that the model supports them."""

    def __init__(self, runner: ModelRunner, *, in_pages: bool = False) -> None:
        """With ``in_pages`` the rows of a group are attended to without a mask, by :mod:`kvboost.hf.row_pages`."""
        self._runner, self._in_pages = runner, in_pages
        self._windows = windows_by_layer(runner.model)
        mkl: Any = torch.backends.mkl
        self._exchange = mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"

    @torch.no_grad()
    def decode(
        self,
        tokens: Sequence[int],
        batch: RowBatch,
        *,
        shared: Sequence[SharedPrefix] = (),
        exchange: bool | None = None,
    ) -> torch.Tensor:
        """Compute one more token of every sequence. Returns their logits [sequences, vocab].

        ``tokens`` are in the order of the batch: group by group, row by row. Every row needs capacity for one more
        token. A prefix in ``shared`` is attended to once where all rows of a group have it. ``exchange`` is whether
        weights may be multiplied with rows; by default the machine and the number of sequences decide.
        """
        rows = [row for group in batch.groups for row in group.rows]
        lengths = [row.get_seq_length() for row in rows]
        if len(tokens) != len(rows) or any(n >= row.capacity for n, row in zip(lengths, rows, strict=True)):
            raise ValueError("a joint step needs a token for every row, and capacity for one more")
        inputs = torch.tensor([list(tokens), lengths], device=self._runner.device)  # [2, sequences], one copy
        steps: list[_GroupStep] = []
        for group in batch.groups:
            begin = steps[-1].batch.stop if steps else 0
            members = range(begin, begin + len(group.rows))
            common = self._shared_by_all(members, shared)
            lengths_of = inputs[1, begin : members.stop]
            steps.append(_GroupStep(group, begin, lengths_of, shared_tokens=common, in_pages=self._in_pages))
        if exchange is None:
            exchange = self._exchange and len(rows) in _EXCHANGED_ROWS
        step = _DecodeStep(steps, [self._windows[layer] for layer in batch.layout.with_kv])
        cache = _batch_cache(batch, step)
        with (
            attending(step, of=self._runner.model.config._attn_implementation),
            replaced(_exchanging(self._runner.model) if exchange else ()),
        ):
            logits = self._runner.run_batch(inputs[0].view(-1, 1), cache, position_ids=inputs[1].view(-1, 1))
        if step.attended != (0 if batch.layout.counts else len(batch.layout.with_kv)):
            raise UnsupportedModelError(f"not all its layers attend through Transformers' {NAME!r}. {_ONE_BY_ONE}")
        for row, length in zip(rows, lengths, strict=True):
            row.set_length(length + 1)
        _keep_states(batch, cache)
        return logits

    def _shared_by_all(self, members: range, shared: Sequence[SharedPrefix]) -> int:
        """Leading tokens that all these sequences share, if attending to them once pays."""
        found = max((prefix.tokens for prefix in shared if {*members} <= {*prefix.members}), default=0)
        pays = found * (len(members) - 1) >= _MIN_SAVED
        return found if pays and self._runner.device.type == "cpu" else 0


def probe_ragged(runner: ModelRunner, layout: KVLayout) -> RaggedRunner:
    """A runner of joint steps, after testing that they give the results of single ones.

    Raises UnsupportedModelError with the reason if they do not.
    """
    if all(has_kernel(spec.device) for spec in layout.slots):
        try:
            return _probed(RaggedRunner(runner, in_pages=True), runner, layout)
        except UnsupportedModelError as error:
            _log.info("rows are attended to under a mask: %s", error)
    return _probed(RaggedRunner(runner), runner, layout)


@torch.no_grad()
def _probed(ragged: RaggedRunner, runner: ModelRunner, layout: KVLayout) -> RaggedRunner:
    config = runner.model.config.get_text_config(decoder=True)
    vocab = min(config.vocab_size, 30_000)
    batch = RowBatch(layout)
    alone, tokens, states = [], [], []
    for number, length in enumerate(_PROBE_LENGTHS):
        ids = [(i * 7919 + number) % vocab for i in range(length + 1)]
        cache = SlabCache(layout, capacity=length + 1)
        runner.append(ids[:length], cache, logits=False)
        row = batch.add(tokens=length + 1)
        row.place(0, cache.span(0, length))
        row.set_length(length)
        row.place_states(cache.states())
        states.append([tensor.clone() for tensor in cache.states()])
        single = runner.append(ids[length:], cache, logits=True)
        assert single is not None
        alone.append(single)
        tokens.append(ids[length])
    for exchange in (False, True):
        try:
            together = ragged.decode(tokens, batch, exchange=exchange)
        except UnsupportedModelError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UnsupportedModelError(f"{config.model_type} cannot decode sequences together ({error})") from error
        for single, joint in zip(alone, together, strict=True):
            compare_logits(config, single, joint, "several sequences are decoded together", remedy=_ONE_BY_ONE)
        rows = [row for group in batch.groups for row in group.rows]
        for row, before in zip(rows, states, strict=True):
            row.set_length(row.get_seq_length() - 1)
            row.place_states(before)
    return ragged
