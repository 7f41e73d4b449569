"""The forwards of running jobs: the last steps of several prompts, or a new token of every job, in one.

Used by :mod:`kvboost.scheduler.loop`. Invariants: prefilled KV has the same bits either way; a job's KV lies in the
batch from its first joint decode step until it ends, is preempted, or a joint step fails. Then all leave the batch,
and join a new one later.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from kvboost.core.prefill import finish_together
from kvboost.core.state import PrefillState
from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVLayout
from kvboost.hf.joint import JointPrefill, probe_joint
from kvboost.hf.ragged import RaggedRunner, SharedPrefix, probe_ragged
from kvboost.hf.rows import RowBatch
from kvboost.hf.runner import ModelRunner
from kvboost.scheduler.sequence import RunningJob

_MAX_PAUSE = 1024  # steps without a joint one after many that failed

_log = logging.getLogger("kvboost.engine")


@dataclass(frozen=True)
class Forwards:
    """The forwards of one model that several jobs may share. Probed once, with the model in use."""

    runner: ModelRunner
    layout: KVLayout
    decode: RaggedRunner | None = None
    prefill: JointPrefill | None = None
    single_reason: str | None = None
    """Why jobs are decoded one at a time."""

    @classmethod
    def probe(cls, runner: ModelRunner, layout: KVLayout) -> Forwards:
        """Test which joint forwards give the results of single ones."""
        decode: RaggedRunner | None = None
        prefill: JointPrefill | None = None
        single_reason: str | None = None
        try:
            decode = probe_ragged(runner, layout)
        except UnsupportedModelError as error:
            single_reason = str(error)
            _log.warning("jobs are decoded one by one: %s", error)
        try:
            prefill = probe_joint(runner, layout)
        except UnsupportedModelError as error:
            _log.info("prompts are prefilled one by one: %s", error)
        return cls(runner, layout, decode, prefill, single_reason)


class _Failures:
    """Joint steps that failed in a row, and how many steps pass before the next one is tried."""

    def __init__(self) -> None:
        self.count = self._pause = 0

    def pauses(self) -> bool:
        """Whether this step is not to be a joint one."""
        self._pause = max(0, self._pause - 1)
        return self._pause > 0

    def one_more(self) -> None:
        """A joint step failed: the next one is tried, and after several in a row a later one."""
        self.count += 1
        self._pause = min(2 ** (self.count - 1), _MAX_PAUSE)


class JobPrefiller:
    """The prefill steps of one loop."""

    def __init__(self, forwards: Forwards) -> None:
        self._joint = forwards.prefill
        self._failures = _Failures()

    def run(self, jobs: Sequence[RunningJob]) -> Iterator[torch.Tensor | Exception | None]:
        """Run the next step of each job; of several, their last. Yields each one's logits [vocab] if it was its last.

        An exception in its place is that job's failure. Jobs that run alone do so when the next result is asked for.
        """
        together = self._together(jobs) if len(jobs) > 1 else None
        if together is not None:
            yield from together
            return
        for job in jobs:
            try:
                yield job.prefill_step()
            except Exception as error:  # noqa: BLE001 - an error of one job ends that job only
                yield error

    def _together(self, jobs: Sequence[RunningJob]) -> torch.Tensor | None:
        """The logits of all jobs, [jobs, vocab]; None if they cannot run together, or failed: each runs alone then."""
        if self._joint is None or self._failures.pauses():
            return None
        for job in jobs:
            job.state.clock.lap("waiting")
        try:
            logits = finish_together(self._joint.append, [job.state for job in jobs])
        except Exception as error:  # noqa: BLE001 - one job may be the cause: each runs alone and ends if it fails again
            self._failures.one_more()
            log = _log.warning if self._failures.count == 1 else _log.info
            log("prompts are prefilled one by one for now: a joint step failed: %r", error)
            return None
        self._failures.count = 0
        return logits


class JointDecoder:
    """The batch of one loop."""

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
    """The decode steps of one loop: joint ones if the model supports them, otherwise one for each job."""

    def __init__(self, forwards: Forwards) -> None:
        self._forwards = forwards
        self._joint = self._new_batch()
        self._failures = _Failures()
        self.single_reason = forwards.single_reason
        """Why jobs are decoded one at a time; None if they are decoded together."""

    def _new_batch(self) -> JointDecoder | None:
        ragged = self._forwards.decode
        return JointDecoder(ragged, self._forwards.layout) if ragged is not None else None

    def limit_spare(self, nbytes: int) -> None:
        """Let unused rows of the batch hold this much from now on."""
        if self._joint is not None:
            self._joint.batch.limit_spare(nbytes)

    def next_joint(self) -> JointDecoder | None:
        """What decodes the jobs of this step together; None if each is decoded alone."""
        return None if self._failures.pauses() else self._joint

    def together(self, joint: JointDecoder, jobs: Sequence[RunningJob]) -> tuple[list[RunningJob], torch.Tensor] | None:
        """The jobs in the order of their logits, [jobs, vocab]; None if that failed: each is decoded alone then."""
        try:
            found = joint.logits(jobs)
        except Exception as error:  # noqa: BLE001 - one job may be the cause: each is retried alone and ends if it fails again
            self._failures.one_more()
            self._joint = self._new_batch()  # what the step left behind is nobody's
            self.single_reason = f"a joint step failed: {error!r}"
            if self._failures.count == 1:
                _log.warning("jobs are decoded one by one for now: %s", self.single_reason)
                warnings.warn(
                    f"{self.single_reason}; jobs are decoded one by one for now", RuntimeWarning, stacklevel=2
                )
            return None
        self._failures.count, self.single_reason = 0, None
        return found

    def alone(self, job: RunningJob) -> torch.Tensor:
        """The logits of one job's next input, [1, vocab]."""
        return self._forwards.runner.decode(job.next_input, job.state.cache)[None]


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
    common = takewhile(lambda column: len(set(column)) == 1, zip(*chains, strict=False))
    return max((column[0][1] for column in common), default=0)
