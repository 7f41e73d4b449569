"""Decodes all running jobs in one forward: their KV moves into one batch as soon as their prompts are prefilled.

Used by :mod:`kvboost.scheduler.runner`, on its thread only. Invariant: a job's KV lies in the batch from its first
joint step until it ends, is preempted, or joint steps are given up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost.core.prefill import PrefillState
from kvboost.hf.cache import KVLayout
from kvboost.hf.ragged import RaggedRunner, SharedPrefix
from kvboost.hf.rows import RowBatch
from kvboost.scheduler.running import RunningJob
from kvboost.scheduler.sharing import shared_prefixes


class JointDecoder:
    """The batch of one runner."""

    def __init__(self, ragged: RaggedRunner, layout: KVLayout) -> None:
        self._ragged = ragged
        self.batch = RowBatch(layout)
        self._shared: tuple[list[PrefillState], list[SharedPrefix]] = ([], [])
        """The prefills decoded last, in order, and what they share."""

    def logits(self, jobs: Sequence[RunningJob]) -> tuple[list[RunningJob], torch.Tensor]:
        """The jobs, all of the batch, in its order, and the logits of each one's next input, [jobs, vocab]."""
        ordered = sorted(jobs, key=lambda job: job.row.order)
        states = [job.state for job in ordered]
        if self._shared[0] != states:
            self._shared = (states, shared_prefixes(ordered))
        return ordered, self._ragged.decode([job.next_input for job in ordered], self.batch, shared=self._shared[1])
