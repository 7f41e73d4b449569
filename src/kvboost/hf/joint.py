"""Prefills the last tokens of several prompts in one forward, each over its own cache.

Used by the batch runner for requests that come together. Linear layers see all rows at once; in tiles a row's bits do
not depend on the others. Each sequence has attention calls of its own. Invariants: in tiles a sequence's KV has the
bits it gets alone (its logits are the same up to rounding: the vocabulary projection is not tiled); on an accelerator,
where no bits are promised, it is the same up to rounding; after a failed step every cache has its previous length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvboost.errors import UnsupportedModelError
from kvboost.hf.attention import NAME, JointStep, UnsupportedAttentionError, attending
from kvboost.hf.cache import KVLayout, SlabCache
from kvboost.hf.cache_layers import SlabLayer, StepLayer
from kvboost.hf.lower_right import PROBE_ERROR, JointLowerRight
from kvboost.hf.probe import compare_logits
from kvboost.hf.runner import ModelRunner

_ONE_BY_ONE = "Prompts are prefilled one after another."
_PROBE = ((0, 3), (20, 2))  # positions held before, and tokens computed together


class _JointLayer(StepLayer):
    """One layer of all sequences: new rows go to each one's cache."""

    def __init__(self, layers: Sequence[SlabLayer], rows: Sequence[int]) -> None:
        super().__init__()
        self._layers, self._rows = layers, list(rows)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new positions of every sequence; the step's attention reads them from its cache."""
        keys, values = (torch.split(states, self._rows, dim=2) for states in (key_states, value_states))
        for layer, key, value in zip(self._layers, keys, values, strict=True):
            layer.update(key, value)
        return key_states, value_states


class JointPrefill:
    """Joint steps of one model. Make it with :func:`probe_joint`, which tests that the model supports them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @contextmanager
    def _step(self, caches: Sequence[SlabCache], rows: list[int]) -> Iterator[JointStep | JointLowerRight]:
        if self._runner.tiles is not None:
            with self._runner.tiles.joint_step(caches, rows) as step:
                yield step
            return
        if self._runner.has_compiled_layers():
            raise UnsupportedAttentionError("layers were compiled by themselves")
        with attending(plan := JointLowerRight(caches, rows)):
            yield plan

    @torch.no_grad()
    def append(self, tokens: Sequence[Sequence[int]], caches: Sequence[SlabCache]) -> torch.Tensor:
        """Compute ``tokens`` of each sequence after what its cache holds. Returns their last logits, [n, vocab]."""
        rows, device = [len(part) for part in tokens], self._runner.device
        starts = [cache.get_seq_length() for cache in caches]
        positions = [start + i for start, count in zip(starts, rows, strict=True) for i in range(count)]
        inputs = torch.tensor([[token for part in tokens for token in part], positions], device=device)
        layers = zip(*(cache.layers for cache in caches), strict=True)
        joint = Cache(layers=[_JointLayer(each, rows) for each in layers])
        try:
            with self._step(caches, rows) as step:
                last = torch.tensor(list(accumulate(rows)), device=device) - 1
                logits = self._runner.run_rows(inputs[0][None], joint, last, position_ids=inputs[1][None])
            if step.calls != len(joint.layers):  # each prompt would have seen the others
                raise UnsupportedAttentionError(f"its attention is not Transformers' {NAME!r} any more")
            return logits
        except BaseException:
            for cache, start in zip(caches, starts, strict=True):
                cache.set_length(start)
            raise


@torch.no_grad()
def probe_joint(runner: ModelRunner, layout: KVLayout) -> JointPrefill:
    """A prefill of several prompts at once, after testing that each gets the bits it gets alone.

    Raises UnsupportedModelError with the reason if they do not.
    """
    config = runner.model.config.get_text_config(decoder=True)
    if runner.tiles is None and (not runner.joins or layout.states or layout.indexed or layout.without_kv):
        raise UnsupportedModelError(f"what a step computes depends on its shape. {_ONE_BY_ONE}")
    joint, vocab = JointPrefill(runner), min(config.vocab_size, 30_000)
    tokens, alone, together, logits = [], [], [], []
    for number, (held, new) in enumerate(_PROBE):
        ids = [(i * 7919 + number) % vocab for i in range(held + new)]
        mine, other = (SlabCache(layout, capacity=held + new) for _ in range(2))
        if held:
            runner.append(ids[:held], mine, logits=False)
            other.place(0, mine.span(0, held))
            other.set_length(held)
        single = runner.append(ids[held:], mine, logits=True)
        assert single is not None
        tokens.append(ids[held:])
        alone.append(mine)
        together.append(other)
        logits.append(single)
    try:
        found = joint.append(tokens, together)
    except (UnsupportedAttentionError, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UnsupportedModelError(f"{config.model_type} cannot prefill prompts together ({error})") from error
    for one, other in zip(alone, together, strict=True):
        length = one.get_seq_length()
        for a, b in zip(one.extract(0, length), other.extract(0, length), strict=True):
            near = runner.tiles is None and (a - b).norm() <= PROBE_ERROR * a.norm()
            if not near and not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                raise UnsupportedModelError(f"{config.model_type} has other KV beside other prompts. {_ONE_BY_ONE}")
    for single, row in zip(logits, found, strict=True):
        compare_logits(config, single, row, "prompts are prefilled together", remedy=_ONE_BY_ONE)
    return joint
