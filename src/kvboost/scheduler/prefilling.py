"""Runs prefill steps of jobs: the last steps of several in one forward, where the model supports it.

Used by :mod:`kvboost.scheduler.runner`, on its thread only. Invariant: a job's KV has the same bits either way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from kvboost.core.prefiller import finish_together
from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVLayout
from kvboost.hf.joint import JointPrefill, probe_joint
from kvboost.scheduler.jobs import ModelParts
from kvboost.scheduler.running import RunningJob

_MAX_PAUSE = 1024  # steps that could have been joint ones, after many that failed

_log = logging.getLogger("kvboost.engine")


class JobPrefiller:
    """The prefill steps of one runner."""

    def __init__(self, parts: ModelParts, layout: KVLayout, *, deterministic: bool) -> None:
        """``deterministic`` forbids joint steps: the first token's logits round by how many there are."""
        self._joint: JointPrefill | None = None
        self._failed = self._pause = 0
        """Joint steps that failed in a row, and steps before the next one is tried."""
        if not deterministic:
            try:
                with parts.running():
                    self._joint = probe_joint(parts.runner, layout)
            except UnsupportedModelError as error:
                _log.info("prompts are prefilled one by one: %s", error)

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
        if self._joint is None:
            return None
        if self._pause:
            self._pause -= 1
            return None
        for job in jobs:
            job.state.clock.lap("waiting")
        try:
            logits = finish_together(self._joint, [job.state for job in jobs])
        except Exception as error:  # noqa: BLE001 - one job may be the cause: each runs alone and ends if it fails again
            self._failed += 1
            self._pause = min(2 ** (self._failed - 1), _MAX_PAUSE) - 1
            log = _log.warning if self._failed == 1 else _log.info
            log("prompts are prefilled one by one for now: a joint step failed: %r", error)
            return None
        self._failed = 0
        return logits
