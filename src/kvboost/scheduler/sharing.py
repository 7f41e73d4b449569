"""Finds running jobs with a common prefix, so that attention over it is computed once for all of them.

Used by :mod:`kvboost.scheduler.runner`. Invariant: jobs are grouped by their chunks' keys, not by their text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvboost.hf.ragged import SharedPrefix
from kvboost.scheduler.running import RunningJob


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
