"""Runs prefill steps of jobs: the last steps of several in one forward, where the model supports it.

Used by :mod:`kvboost.scheduler.runner`, on its thread only. Invariant: a job's KV has the same bits either way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from kvboost.core.prefiller import finish_together
from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVLayout
from kvboost.hf.joint import JointPrefill, probe_joint
from kvboost.scheduler.jobs import ModelParts
from kvboost.scheduler.running import RunningJob

_log = logging.getLogger("kvboost.engine")


class JobPrefiller:
    """The prefill steps of one runner."""

    def __init__(self, parts: ModelParts, layout: KVLayout, *, deterministic: bool) -> None:
        """``deterministic`` forbids joint steps: the first token's logits round by how many there are."""
        self._joint: JointPrefill | None = None
        self.single_reason: str | None = "deterministic" if deterministic else None
        """Why each job is prefilled alone; None if last steps are run together."""
        if not deterministic:
            try:
                with parts.running():
                    self._joint = probe_joint(parts.runner, layout)
            except UnsupportedModelError as error:
                self.single_reason = str(error)
                _log.info("prompts are prefilled one by one: %s", error)

    def run(self, jobs: Sequence[RunningJob]) -> list[torch.Tensor | Exception | None]:
        """Run the next step of each job; of several, their last. Returns each one's logits [vocab] if it was its last.

        An exception in its place is that job's failure.
        """
        if len(jobs) > 1 and self._joint is not None:
            for job in jobs:
                job.state.clock.lap("waiting")
            try:
                return list(finish_together(self._joint, [job.state for job in jobs]))
            except Exception as error:  # noqa: BLE001 - one job may be the cause: each runs alone and ends if it fails
                self._joint, self.single_reason = None, f"a joint step failed: {error!r}"
                _log.warning("prompts are prefilled one by one from now on: %s", self.single_reason)
        return [self._alone(job) for job in jobs]

    @staticmethod
    def _alone(job: RunningJob) -> torch.Tensor | Exception | None:
        try:
            return job.prefill_step()
        except Exception as error:  # noqa: BLE001 - an error of one job ends that job only
            return error
