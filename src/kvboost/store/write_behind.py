"""Writes to slower tiers after the request, in order, with a bound on what waits.

Used by :class:`kvboost.store.tiered.TieredStore`. Invariants: what waits never takes more than the bound, but for one
block alone that is larger; a block that is refused is reported to the caller at once, and one that a tier did not
keep when it was tried; after :meth:`WriteBehind.wait` everything accepted before was offered to its tiers; no tier sees
a block before its bytes are there; whatever a job raises, the next one is done and
nobody waits for ever; every block that is given up is counted.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvboost.extend import Tier
from kvboost.streams import Streams
from kvboost.types import KVBlock, PutOutcome

_MAX_TRIES = 3  # of storing one block below
_MAX_KEYS = 100_000  # of blocks that wait to be tried again
_MAX_NOTES = 1024  # further ones are dropped: they only say what was used lately

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    number: int
    tenant: str
    nbytes: int
    tiers: Sequence[Tier]
    work: Callable[[], None]


class WriteBehind:
    """Stores blocks in tiers, in a thread that starts with the first block and stops when closed."""

    def __init__(
        self,
        max_bytes: int,
        *,
        streams: Streams,
        failed: Callable[[Tier, BaseException], None],
        tried: Callable[[KVBlock, bool], None],
        offered: Callable[[Tier, KVBlock, PutOutcome], None],
    ) -> None:
        """At most ``max_bytes`` wait.

        ``failed`` gets what a tier raised, ``offered`` what a tier made of a block, and ``tried`` whether a block is
        now in all tiers it was meant for.
        """
        self._max_bytes, self._streams = max_bytes, streams
        self._failed, self._tried, self._offered = failed, tried, offered
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        # Of what waits and what is being written, by tenant.
        self._jobs: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._given = self._done = 0  # numbers of the newest job, and of the last one that is over
        self._thread: threading.Thread | None = None
        self._closed = False
        self._logged = False

    def waiting_bytes(self, tenant: str | None = None) -> int:
        """Bytes of the blocks that are not written yet, of one tenant or of all."""
        with self._changed:
            return self._bytes.total() if tenant is None else self._bytes[tenant]

    def offer(self, block: KVBlock, tiers: Sequence[Tier]) -> bool:
        """Accept ``block`` to be stored in ``tiers``; False if too much waits already."""
        with self._changed:
            waiting = self._bytes.total()
            if waiting and waiting + block.nbytes > self._max_bytes:
                return False
            return self._give(block.tenant, block.nbytes, tiers, lambda: self._store(block, tiers))

    def note(self, tenant: str, tier: Tier, work: Callable[[], None]) -> None:
        """Tell ``tier`` something when its turn comes, if not too much waits already."""
        with self._changed:
            if len(self._waiting) < _MAX_NOTES:
                self._give(tenant, 0, [tier], work)

    def wait(self, tenant: str | None = None) -> None:
        """Return once all that was accepted so far is done, or all of one tenant."""
        with self._changed:
            last = self._given
            self._changed.wait_for(lambda: self._done >= last or not self._jobs_of(tenant))

    def forget(self, tenant: str | None = None) -> None:
        """Drop what waits, or what waits for one tenant, and return once what was being written is."""
        with self._changed:
            jobs, self._waiting = self._waiting, deque()
            for job in jobs:
                if tenant in (None, job.tenant):
                    self._count(job, -1)
                else:
                    self._waiting.append(job)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._jobs_of(tenant))

    def close(self) -> None:
        """Do what waits, then stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            try:
                job.work()
            except BaseException as error:  # noqa: BLE001 - whatever it is, what waits must go on
                self._log_once(error)
                for tier in job.tiers:
                    self._report(tier, error)
            with self._changed:
                self._done = job.number
                self._count(job, -1)
                self._changed.notify_all()

    def _report(self, tier: Tier, error: BaseException) -> None:
        """A tier failed. Whatever comes of reporting ends here, a warning where warnings are errors most of all."""
        try:
            self._failed(tier, error)
        except Exception as raised:  # noqa: BLE001 - the other tiers get the block, and the thread goes on
            self._log_once(raised)

    def _log_once(self, error: BaseException) -> None:
        if not self._logged:
            self._logged = True
            _log.error("writing behind failed; later jobs go on, and more failures are only counted", exc_info=error)

    def _give(self, tenant: str, nbytes: int, tiers: Sequence[Tier], work: Callable[[], None]) -> bool:
        if self._closed:
            return False
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvboost-write-behind", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the machine has none left: the next job tries again
                return False
            self._thread = thread
        self._given += 1
        job = _Job(self._given, tenant, nbytes, tiers, work)
        self._count(job, 1)
        self._waiting.append(job)
        self._changed.notify_all()
        return True

    def _jobs_of(self, tenant: str | None) -> int:
        return self._jobs.total() if tenant is None else self._jobs[tenant]

    def _count(self, job: _Job, sign: int) -> None:
        """A job came or went; the condition is held."""
        for counter, by in ((self._jobs, 1), (self._bytes, job.nbytes)):
            counter[job.tenant] += sign * by
            if not counter[job.tenant]:
                del counter[job.tenant]

    def _store(self, block: KVBlock, tiers: Sequence[Tier]) -> None:
        kept = 0
        on_host: KVBlock | None = None  # once for all tiers that write bytes
        try:
            for tier in tiers:
                try:
                    if block.ready is not None:
                        block.ready.synchronize()  # the device may not have computed it yet
                        block = replace(block, ready=None)
                    if tier.outlives_process and on_host is None:
                        on_host = replace(block, tensors=self._streams.on_host(block.tensors))
                    outcome = tier.store(on_host if tier.outlives_process and on_host is not None else block)
                    self._offered(tier, block, outcome)
                    kept += outcome is not PutOutcome.REFUSED
                except BaseException as error:  # noqa: BLE001 - whatever a tier raises, the others get the block
                    self._report(tier, error)
        finally:
            self._tried(block, kept == len(tiers))


class Unsaved:
    """Blocks that no tier has yet, oldest first, so that they are tried again, a few times at most. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tries: dict[bytes, int] = {}
        self._dropped = 0
        self._lost = 0

    def remember(self, key: bytes, *, tries: int = 0) -> None:
        """A write was dropped, after so many tries."""
        with self._lock:
            self._dropped += 1
            self._tries[key] = tries
            if len(self._tries) > _MAX_KEYS:
                self._tries.pop(next(iter(self._tries)))
                self._lost += 1

    def tried(self, block: KVBlock, kept: bool) -> None:
        """A tier may have been full, busy or out of reach: a few times the block is tried again, at the next flush."""
        with self._lock:
            tries = self._tries.pop(block.key, 0) + 1
            self._lost += not kept and tries >= _MAX_TRIES
        if not kept and tries < _MAX_TRIES:
            self.remember(block.key, tries=tries)

    def forget(self, key: bytes) -> bool:
        """The block leaves the memory. Whether it was unsaved."""
        with self._lock:
            return self._tries.pop(key, None) is not None

    def dropped(self, *, lost: bool) -> None:
        """A block left the memory and no tier took it; ``lost`` if none has it."""
        with self._lock:
            self._dropped += 1
            self._lost += lost

    def keys(self) -> list[bytes]:
        """The keys, oldest first."""
        with self._lock:
            return list(self._tries)

    def clear(self) -> None:
        """Drop every key."""
        with self._lock:
            self._tries.clear()

    def counts(self) -> tuple[int, int]:
        """Writes that were dropped, and blocks that no tier has."""
        with self._lock:
            return self._dropped, self._lost + len(self._tries)
