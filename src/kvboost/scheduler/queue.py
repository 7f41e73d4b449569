"""Who runs next: queues, budgets and fairness, as plain data.

Asked by :mod:`kvboost.scheduler.runner` between steps; knows neither torch nor the model. A step is: preempt, admit,
read a few chunks, decode one token for everybody, tick. Invariants: the bytes reserved for admitted jobs never exceed
the budget; a job that has waited ``patience`` steps is passed by nobody, and who has decoded ``patience`` tokens makes
room for it, so every wait is bounded; a job that waits for another to read their common beginning is let go as soon as
that one has read it, has ended, or patience is over.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvboost.errors import BusyError, CapacityError

_PLACED_PER_READ = 64  # rows copied from the store in the time that one row is computed, at least
_MAX_PASSED = 8  # chunks that shorter prompts may read before a longer one reads its next


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may run at once."""

    max_running: int
    max_waiting: int
    kv_bytes: int
    chunk_budget: int
    """Rows read between two decode steps. At least one chunk is read, however long it is."""
    patience: int
    """In steps."""


@dataclass
class _Entry:
    """A job as the scheduler sees it."""

    number: int
    tenant: str
    nbytes: int
    """Reserved for it while it runs."""
    chain: tuple[bytes, ...]
    """The prefix keys of its chunks: equal keys, equal text up to there."""
    arrived: int
    """Its place in the line; a new one after it was preempted."""
    held: int = 0
    """Bytes it holds: more than predicted if a larger workspace lay idle."""
    waited: int = 0
    steps: list[int] = field(default_factory=list)
    """Rows of the reading steps it still needs, last first."""
    opened: bool = False
    at_hand: int = 0
    """Chunks of its chain that are stored or could be."""
    provides: int = 0
    """Chunks of its chain that will be, once it has read them."""
    passed: int = 0
    """Reading steps that others were given instead."""
    decoded: int = 0
    """New tokens since it was admitted."""


class Scheduler:
    """The policy of one runner. Not thread-safe: its owner holds a lock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._numbers = itertools.count()
        self._places = itertools.count()
        self._waiting: dict[int, _Entry] = {}
        self._running: dict[int, _Entry] = {}

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Jobs that were admitted and have not ended."""
        return len(self._running)

    @property
    def reserved_bytes(self) -> int:
        """What the admitted jobs may come to hold."""
        return sum(max(entry.nbytes, entry.held) for entry in self._running.values())

    def add(self, *, tenant: str, nbytes: int, chain: Sequence[bytes], peak: int | None = None) -> int:
        """Queue a job that needs ``nbytes`` to begin with and ``peak`` at most (the same if left out).

        Raises CapacityError for one that can never fit, BusyError if too many wait: ``max_waiting`` in all, of which
        this tenant has its even share. So a queue that one tenant filled is open to others, and is longer for a while.
        """
        peak = nbytes if peak is None else peak
        if peak > self.limits.kv_bytes:
            raise CapacityError(
                f"this job may need {peak:,} bytes of KV, of which {self.limits.kv_bytes:,} are allowed in all; "
                "shorten the prompt, lower max_new_tokens or raise kv_bytes"
            )
        if len(self._waiting) >= self.limits.max_waiting and self._has_its_share(tenant):
            raise BusyError(f"{len(self._waiting)} jobs are waiting already; try again later or raise max_waiting")
        number = next(self._numbers)
        self._waiting[number] = _Entry(number, tenant, nbytes, tuple(chain), next(self._places))
        return number

    def _has_its_share(self, tenant: str) -> bool:
        """Whether a tenant fills its part of the queue. Who does not is let in, however many others wait."""
        waiting = Counter(entry.tenant for entry in self._waiting.values())
        return waiting[tenant] >= max(1, self.limits.max_waiting // len({*waiting, tenant}))

    def admit(self) -> int | None:
        """The next job to open now; call again after each. None if nobody may."""
        if len(self._running) >= self.limits.max_running:
            return None
        free = self.limits.kv_bytes - self.reserved_bytes
        for entry in self._in_line():
            aged = self._aged(entry)
            if not aged and self._somebody_reads_for(entry):
                continue
            if entry.nbytes <= free:
                del self._waiting[entry.number]
                self._running[entry.number] = entry
                entry.opened, entry.decoded, entry.passed = False, 0, 0
                return entry.number
            if aged:
                return None  # nobody may take the room it waits for
        return None

    def opened(self, number: int, *, at_hand: int, provides: int, steps: Sequence[int], held: int = 0) -> None:
        """An admitted job found ``at_hand`` chunks, will provide so many, and needs these reading steps (in rows)."""
        entry = self._running[number]
        entry.opened, entry.at_hand, entry.provides = True, at_hand, provides
        entry.steps = list(reversed(steps))
        entry.held = held

    @staticmethod
    def cost_of_placing(rows: int) -> int:
        """Rows that could be read in the time it takes to copy ``rows`` from the store."""
        return rows // _PLACED_PER_READ

    def next_read(self, *, used: int) -> int | None:
        """Who reads its next chunk, ``used`` rows into this step's budget. None if it is used up or nobody reads.

        The one with the fewest rows left, so that short prompts do not wait for long ones; but who was passed
        several times goes first.
        """
        reading = [entry for entry in self._running.values() if entry.steps]
        if not reading:
            return None
        passed = [entry for entry in reading if entry.passed >= _MAX_PASSED]
        chosen = min(passed, key=lambda e: e.arrived) if passed else min(reading, key=_rows_left)
        if used and used + chosen.steps[-1] > self.limits.chunk_budget:
            return None
        for entry in reading:
            entry.passed += entry is not chosen
        chosen.passed = 0
        return chosen.number

    def read(self, number: int, *, at_hand: int, steps: Sequence[int]) -> None:
        """The job has read on: so many chunks are at hand now and these steps are left."""
        entry = self._running[number]
        entry.at_hand, entry.steps = at_hand, list(reversed(steps))

    def decoding(self) -> list[int]:
        """Jobs that have read their prompt, in the order they came."""
        ready = [entry for entry in self._running.values() if entry.opened and not entry.steps]
        return [entry.number for entry in sorted(ready, key=lambda e: e.number)]

    def decoded(self, number: int) -> None:
        """The job has one more new token."""
        self._running[number].decoded += 1

    def preempt(self) -> int | None:
        """A job to send back to the end of the line, because somebody's patience is over. Call again after each.

        Only who got ``patience`` tokens done since it was admitted: everybody gets on.
        """
        aged = [entry for entry in self._in_line() if self._aged(entry)]
        free = self.limits.kv_bytes - self.reserved_bytes
        if not aged or (len(self._running) < self.limits.max_running and aged[0].nbytes <= free):
            return None
        ripe = [e for e in self._running.values() if not e.steps and e.decoded >= self.limits.patience]
        if not ripe:
            return None
        chosen = max(ripe, key=lambda e: (e.decoded, e.number))
        chosen.arrived = next(self._places)
        return self._send_back(chosen)

    def grow(self, number: int, nbytes: int) -> bool:
        """Reserve so many bytes for a running job, instead of what it had. False if they are not free."""
        entry = self._running[number]
        if self.reserved_bytes - max(entry.nbytes, entry.held) + nbytes > self.limits.kv_bytes:
            return False
        entry.nbytes, entry.held = nbytes, 0
        return True

    def yield_to(self, number: int, nbytes: int) -> int:
        """Who gives up its room, for now, so that a running job may grow: the last in line of all, perhaps itself.

        The first in line never does, so somebody always gets on. Who does keeps its place.
        """
        last = max(self._running.values(), key=lambda e: e.arrived)
        if last.number == number:
            last.nbytes = nbytes
        return self._send_back(last)

    def _send_back(self, entry: _Entry) -> int:
        del self._running[entry.number]
        entry.waited = entry.held = 0
        self._waiting[entry.number] = entry
        return entry.number

    def remove(self, number: int) -> None:
        """The job has ended, wherever it was."""
        self._waiting.pop(number, None)
        self._running.pop(number, None)

    def tick(self) -> None:
        """One step is over."""
        for entry in self._waiting.values():
            entry.waited += 1

    def _aged(self, entry: _Entry) -> bool:
        return entry.waited >= self.limits.patience

    def _in_line(self) -> list[_Entry]:
        """Those whose patience is over, then those whose tenant has least running; first come, first served."""
        runs = Counter(entry.tenant for entry in self._running.values())

        def place(entry: _Entry) -> tuple[bool, int, int]:
            aged = self._aged(entry)
            return not aged, 0 if aged else runs[entry.tenant], entry.arrived

        return sorted(self._waiting.values(), key=place)

    def _somebody_reads_for(self, entry: _Entry) -> bool:
        """Whether a running job is about to read a part of this one's beginning."""
        for other in self._running.values():
            # Until it is opened, a job may be about to read anything. A key names all that stands before it too.
            begin, end = (other.at_hand, other.provides) if other.opened else (0, len(other.chain))
            if begin < min(end, len(entry.chain)) and entry.chain[begin] == other.chain[begin]:
                return True
        return False


def _rows_left(entry: _Entry) -> tuple[int, int]:
    return sum(entry.steps), entry.arrived
