"""The scheduling policy: queues, budgets and fairness, as plain data.

Used by :mod:`kvboost.scheduler.runner` between steps; imports neither torch nor the model. A step is: preempt, admit,
prefill a few chunks, decode one token for every job, tick. Invariants: the bytes reserved for admitted jobs never
exceed the budget. No job overtakes one that has waited ``max_wait_steps`` steps, and jobs that have decoded as many
tokens may be preempted for it, so every wait is bounded. A job that waits for another to prefill their common prefix
is released as soon as that one has prefilled it, has ended, or the wait reaches ``max_wait_steps``. A job whose KV is
being loaded keeps its turn, and others pass it.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvboost.errors import BusyError, CapacityError, ConfigError

_COPIED_PER_COMPUTED = 64  # tokens copied from the store in the time to compute one, at least
_MAX_SKIPPED = 8  # steps of shorter prompts, alone or together, before the next one of a longer prompt


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of what runs concurrently."""

    max_running: int
    max_waiting: int
    kv_bytes: int
    chunk_budget: int
    """Prompt tokens prefilled between two decode steps; at least one chunk, however long it is."""
    max_wait_steps: int
    """Steps after which no job overtakes a waiting one, and tokens after which a running one may be preempted."""
    max_step: int = sys.maxsize
    """Tokens of one forward that memory was planned for."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "chunk_budget", "max_wait_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass
class _Entry:
    """A job as the scheduler sees it."""

    number: int
    tenant: str
    nbytes: int
    """Bytes reserved for it while it runs."""
    chain: tuple[bytes, ...]
    """The prefix keys of its chunks: equal keys, equal text up to there."""
    arrived: int
    """Its arrival number; a new one after a preemption for fairness."""
    group: str = ""
    """Only jobs of one group run at the same time."""
    held: int = 0
    """Bytes it holds: more than predicted if it got a larger idle workspace."""
    waited: int = 0
    steps: list[int] = field(default_factory=list)
    """Tokens of its remaining prefill steps, last first."""
    loading: bool = False
    """Whether its KV is being loaded from a slower tier: then it is neither admitted nor starving."""
    opened: bool = False
    available: int = 0
    """Chunks of its chain that are stored, or were offered to the store."""
    will_provide: int = 0
    """Chunks of its chain that will be available after its prefill."""
    skipped: int = 0
    """Prefill steps that went to other jobs instead."""
    decoded: int = 0
    """New tokens since it was admitted."""


class Scheduler:
    """The policy of one runner. Not thread-safe: its owner holds a lock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._numbers = itertools.count()
        self._arrivals = itertools.count()
        self._waiting: dict[int, _Entry] = {}
        self._running: dict[int, _Entry] = {}
        self.preempted = 0
        """How often a running job was moved back to the queue."""

    @property
    def waiting(self) -> int:
        """Number of waiting jobs."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of admitted jobs that have not ended."""
        return len(self._running)

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for the admitted jobs."""
        return sum(max(entry.nbytes, entry.held) for entry in self._running.values())

    def add(
        self,
        *,
        tenant: str,
        nbytes: int,
        chain: Sequence[bytes],
        peak: int | None = None,
        group: str = "",
        loading: bool = False,
    ) -> int:
        """Queue a job that needs ``nbytes`` at first and at most ``peak`` (the same if left out).

        With ``loading`` it is not admitted before :meth:`loaded` is called.

        Raises CapacityError if it can never fit. Raises BusyError if ``max_waiting`` jobs are waiting and this tenant
        has its even share of them. A queue filled by one tenant stays open to others, and is longer for a while.
        """
        peak = nbytes if peak is None else peak
        if peak > self.limits.kv_bytes:
            raise CapacityError(
                f"this job may need {peak:,} bytes of KV, of which {self.limits.kv_bytes:,} are allowed in all; "
                "shorten the prompt, lower max_new_tokens or raise kv_bytes"
            )
        if len(self._waiting) >= self.limits.max_waiting and self._fills_its_share(tenant):
            raise BusyError(f"{len(self._waiting)} jobs are waiting already; try again later or raise max_waiting")
        number = next(self._numbers)
        entry = _Entry(number, tenant, nbytes, tuple(chain), next(self._arrivals), group, loading=loading)
        self._waiting[number] = entry
        return number

    def _fills_its_share(self, tenant: str) -> bool:
        """Whether a tenant fills its share of the queue. Below its share it is accepted even if the queue is full."""
        waiting = Counter(entry.tenant for entry in self._waiting.values())
        return waiting[tenant] >= max(1, self.limits.max_waiting // len({*waiting, tenant}))

    def group(self) -> str:
        """The group whose jobs run, or would run next."""
        first = next(iter(self._running.values()), None) or next(iter(self._by_priority()), None)
        return first.group if first is not None else ""

    def admit(self, group: str = "") -> int | None:
        """The next job of ``group`` to open now; call again after each. None if there is none."""
        if len(self._running) >= self.limits.max_running:
            return None
        free = self.limits.kv_bytes - self.reserved_bytes
        for entry in self._by_priority():
            if entry.loading:
                return None  # and so are all after it
            starving = self._starving(entry)
            if entry.group != group:
                if starving:
                    return None  # the running jobs end or are preempted; then it is its group's turn
                continue
            if not starving and self._prefix_in_progress(entry):
                continue
            if entry.nbytes <= free:
                del self._waiting[entry.number]
                self._running[entry.number] = entry
                entry.opened, entry.decoded, entry.skipped = False, 0, 0
                return entry.number
            if starving:
                return None  # no other job may take the memory it waits for
        return None

    def postpone(self, number: int) -> None:
        """An admitted job that was not opened waits again, in its turn, until :meth:`loaded` is called."""
        entry = self._waiting[number] = self._running.pop(number)
        entry.loading = True

    def loaded(self, number: int) -> None:
        """Its KV is in memory, or is not waited for any more."""
        if number in self._waiting:
            self._waiting[number].loading = False

    def opened(self, number: int, *, available: int, will_provide: int, steps: Sequence[int], held: int = 0) -> None:
        """An admitted job found ``available`` chunks, will provide more, and needs these prefill steps (in tokens)."""
        entry = self._running[number]
        entry.opened, entry.available, entry.will_provide = True, available, will_provide
        entry.steps = list(reversed(steps))
        entry.held = held

    @staticmethod
    def cost_of_copying(tokens: int) -> int:
        """Tokens that could be computed in the time to copy ``tokens`` from the store."""
        return tokens // _COPIED_PER_COMPUTED

    def prefilling(self) -> list[int]:
        """Jobs with prefill steps to come."""
        return [entry.number for entry in self._running.values() if entry.steps]

    def next_prefill(self, *, used: int, budget: int) -> list[int]:
        """The jobs that prefill their next step together, after ``used`` tokens of this step's ``budget``.

        The job with the fewest tokens left, so that short prompts do not wait for long ones; but a job that was
        skipped several times comes first. If that is its last step, others that fit the budget with their last steps.
        """
        prefilling = [entry for entry in self._running.values() if entry.steps]
        prefilling.sort(key=lambda entry: (sum(entry.steps), entry.arrived))
        if not prefilling:
            return []
        skipped = [entry for entry in prefilling if entry.skipped >= _MAX_SKIPPED]
        first = min(skipped, key=lambda e: e.arrived) if skipped else prefilling[0]
        if used and used + first.steps[-1] > budget:
            return []
        left = min(budget - used, self.limits.max_step) - first.steps[-1]
        chosen = [first]
        for entry in prefilling if len(first.steps) == 1 else ():
            if entry is not first and len(entry.steps) == 1 and entry.steps[0] <= left:
                chosen.append(entry)
                left -= entry.steps[0]
        for entry in prefilling:
            entry.skipped = 0 if entry in chosen else entry.skipped + len(chosen)
        return [entry.number for entry in chosen]

    def prefilled(self, number: int, *, available: int, steps: Sequence[int]) -> None:
        """Now ``available`` chunks of the job are available, and these steps of its prefill remain."""
        entry = self._running[number]
        entry.available, entry.steps = available, list(reversed(steps))

    def decoding(self) -> list[int]:
        """Jobs whose prefill is complete, in order of submission."""
        ready = [entry for entry in self._running.values() if entry.opened and not entry.steps]
        return [entry.number for entry in sorted(ready, key=lambda e: e.number)]

    def moved(self, number: int, *, held: int) -> None:
        """The job holds this many bytes now, no more than were reserved for it."""
        self._running[number].held = held

    def decoded(self, number: int) -> None:
        """The job has one more new token."""
        self._running[number].decoded += 1

    def preempt(self) -> int | None:
        """A job to move to the end of the queue, because another has waited too long. Call again after each.

        Only a job that has decoded ``max_wait_steps`` tokens since it was admitted, so that every job makes progress.
        """
        starving = [entry for entry in self._by_priority() if self._starving(entry)]
        free = self.limits.kv_bytes - self.reserved_bytes
        if not starving:
            return None
        fits = len(self._running) < self.limits.max_running and starving[0].nbytes <= free
        if fits and starving[0].group == self.group():
            return None
        candidates = [e for e in self._running.values() if not e.steps and e.decoded >= self.limits.max_wait_steps]
        if not candidates:
            return None
        chosen = max(candidates, key=lambda e: (e.decoded, e.number))
        chosen.arrived = next(self._arrivals)
        return self._requeue(chosen)

    def grow(self, number: int, nbytes: int) -> bool:
        """Change the reservation of a running job to ``nbytes``. False if they are not free."""
        entry = self._running[number]
        if self.reserved_bytes - max(entry.nbytes, entry.held) + nbytes > self.limits.kv_bytes:
            return False
        entry.nbytes, entry.held = nbytes, 0
        return True

    def preempt_for(self, number: int, nbytes: int) -> int:
        """The job to preempt so that a running job may grow: the last one to arrive, perhaps that job itself.

        The first one to arrive is never preempted, so progress is guaranteed. A preempted job keeps its priority.
        """
        last = max(self._running.values(), key=lambda e: e.arrived)
        if last.number == number:
            last.nbytes = nbytes
        return self._requeue(last)

    def _requeue(self, entry: _Entry) -> int:
        del self._running[entry.number]
        self.preempted += 1
        entry.waited = entry.held = 0
        self._waiting[entry.number] = entry
        return entry.number

    def remove(self, number: int) -> None:
        """The job has ended, waiting or running."""
        self._waiting.pop(number, None)
        self._running.pop(number, None)

    def tick(self) -> None:
        """One step is over."""
        for entry in self._waiting.values():
            entry.waited += not entry.loading  # no other job is to blame for a slow tier

    def _starving(self, entry: _Entry) -> bool:
        return entry.waited >= self.limits.max_wait_steps and not entry.loading

    def _by_priority(self) -> list[_Entry]:
        """Waiting jobs: starving ones first, then those whose tenant has the fewest running, then by arrival.

        Those that are loading come last.
        """
        runs = Counter(entry.tenant for entry in self._running.values())

        def priority(entry: _Entry) -> tuple[bool, bool, int, int]:
            starving = self._starving(entry)
            return entry.loading, not starving, 0 if starving else runs[entry.tenant], entry.arrived

        return sorted(self._waiting.values(), key=priority)

    def _prefix_in_progress(self, entry: _Entry) -> bool:
        """Whether a running job is about to prefill a part of this one's prefix."""
        for other in self._running.values():
            # Until it is opened, a job may be about to prefill anything. A prefix key covers everything before it.
            begin, end = (other.available, other.will_provide) if other.opened else (0, len(other.chain))
            if begin < min(end, len(entry.chain), len(other.chain)) and entry.chain[begin] == other.chain[begin]:
                return True
        return False
