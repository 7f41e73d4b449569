"""Decodes all running jobs in one forward: their KV moves into one batch as soon as their prompts are prefilled.

Used by :mod:`kvboost.scheduler.runner`, on its thread only. Invariant: a job's KV lies in the batch from its first
joint step until it ends, is preempted, or a joint step fails. Then all leave the batch, and join a new one later.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable, Sequence

import torch

from kvboost.core.prefill import PrefillState
from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVLayout
from kvboost.hf.ragged import RaggedRunner, SharedPrefix, probe_ragged
from kvboost.hf.rows import RowBatch
from kvboost.scheduler.jobs import ModelParts
from kvboost.scheduler.running import RunningJob

_MAX_PAUSE = 1024  # steps without a joint one after many that failed

_log = logging.getLogger("kvboost.engine")


class JointDecoder:
    """The batch of one runner."""

    def __init__(self, ragged: RaggedRunner, layout: KVLayout) -> None:
        self._ragged = ragged
        self.batch = RowBatch(layout)
        self._shared: tuple[list[weakref.ref[PrefillState]], list[SharedPrefix]] = ([], [])
        """The prefills decoded last, in order, and what they share. Weak: their KV is freed with them."""

    def logits(self, jobs: Sequence[RunningJob]) -> tuple[list[RunningJob], torch.Tensor]:
        """The jobs, all of the batch, in its order, and the logits of each one's next input, [jobs, vocab]."""
        ordered = sorted(jobs, key=lambda job: job.row.order)
        states = [job.state for job in ordered]
        if [known() for known in self._shared[0]] != states:
            self._shared = ([weakref.ref(state) for state in states], shared_prefixes(ordered))
        return ordered, self._ragged.decode([job.next_input for job in ordered], self.batch, shared=self._shared[1])


class JobDecoder:
    """The decode steps of one runner: joint ones if the model supports them, otherwise one for each job."""

    def __init__(self, parts: ModelParts, layout: KVLayout, *, deterministic: bool) -> None:
        """``deterministic`` forbids joint steps: their shapes depend on the other jobs."""
        self._runner = parts.runner
        self._layout = layout
        self._ragged: RaggedRunner | None = None
        self._joint: JointDecoder | None = None
        self._failed = self._pause = 0
        """Joint steps that failed in a row, and steps before the next one is tried."""
        self.single_reason: str | None = "deterministic" if deterministic else None
        """Why jobs are decoded one at a time; None if they are decoded together."""
        if not deterministic:
            try:
                with parts.running():
                    self._ragged = probe_ragged(parts.runner, layout)
                self._joint = JointDecoder(self._ragged, layout)
            except UnsupportedModelError as error:
                self.single_reason = str(error)
                _log.warning("jobs are decoded one by one: %s", error)

    def limit_spare(self, nbytes: int) -> None:
        """Let rows of the batch that nobody uses take this much from now on."""
        if self._joint is not None:
            self._joint.batch.limit_spare(nbytes)

    def next_joint(self) -> JointDecoder | None:
        """What decodes the jobs of this step together; None if each is decoded alone."""
        if self._pause:
            self._pause -= 1
            return None
        return self._joint

    def together(self, joint: JointDecoder, jobs: Sequence[RunningJob]) -> tuple[list[RunningJob], torch.Tensor] | None:
        """The jobs in the order of their logits, [jobs, vocab]; None if that failed: each is decoded alone then.

        A step that failed is a step: the next one is tried together again, and after several in a row a later one.
        """
        try:
            found = joint.logits(jobs)
        except Exception as error:  # noqa: BLE001 - one job may be the cause: each is retried alone and ends if it fails again
            self._failed += 1
            self._pause = min(2 ** (self._failed - 1), _MAX_PAUSE) - 1
            assert self._ragged is not None
            self._joint = JointDecoder(self._ragged, self._layout)  # what the step left behind is nobody's
            self.single_reason = f"a joint step failed: {error!r}"
            if self._failed == 1:
                _log.warning("jobs are decoded one by one for now: %s", self.single_reason)
                warnings.warn(
                    f"{self.single_reason}; jobs are decoded one by one for now", RuntimeWarning, stacklevel=2
                )
            return None
        self._failed, self.single_reason = 0, None
        return found

    def alone(self, job: RunningJob) -> torch.Tensor:
        """The logits of one job's next input, [1, vocab]."""
        return self._runner.decode(job.next_input, job.state.cache)[None]


def shared_prefixes(jobs: Sequence[RunningJob]) -> list[SharedPrefix]:
    """Groups of jobs with the same first chunk, and the length of the prefix that all of a group share."""
    groups: dict[bytes, list[int]] = {}
    chains = [job.shared_chain() for job in jobs]
    for index, chain in enumerate(chains):
        if chain:
            groups.setdefault(chain[0][0], []).append(index)
    return [
        SharedPrefix(tuple(members), _common_end([chains[index] for index in members]))
        for members in groups.values()
        if len(members) > 1
    ]


def _common_end(chains: Iterable[Sequence[tuple[bytes, int]]]) -> int:
    end = 0
    for column in zip(*chains, strict=False):
        if any(entry != column[0] for entry in column):
            break
        end = column[0][1]
    return end
