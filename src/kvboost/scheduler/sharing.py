"""Which running jobs begin with the same rows, so that attention over those is computed once for all of them.

Used by :mod:`kvboost.scheduler.runner`. Invariant: jobs are grouped by their chunks' keys, not by their text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvboost.hf.ragged import SharedStart
from kvboost.scheduler.running import RunningJob


def shared_starts(jobs: Sequence[RunningJob]) -> list[SharedStart]:
    """Which jobs begin with the same rows, and how many: by their first chunk, as far as all of them agree."""
    groups: dict[bytes, list[int]] = {}
    chains = [job.shared_chain() for job in jobs]
    for index, chain in enumerate(chains):
        if chain:
            groups.setdefault(chain[0][0], []).append(index)
    return [
        SharedStart(tuple(members), _common_end([chains[index] for index in members]))
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
