"""Writes to slower tiers behind the request's back, in order, with a bound on what waits.

Used by :class:`kvboost.store.tiered.TieredStore`. Invariants: what waits never takes more than the bound, but for one
block alone that is larger; a block that is not taken is reported to the caller at once, and one that a tier did not
keep when it was tried; after :meth:`WriteBehind.wait` everything taken before was offered to its tiers; no tier sees a
block before its bytes are there; whatever a job raises, the next one is done and nobody waits for ever.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvboost.extend import Tier
from kvboost.streams import Streams
from kvboost.types import KVBlock, PutOutcome

_MAX_NOTES = 1024  # further ones are dropped: they only say what was used lately

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    number: int
    owner: WriteBehind
    nbytes: int
    tiers: Sequence[Tier]
    work: Callable[[], None]


class WriteQueue:
    """What waits to be written, at most ``max_bytes`` of it, and the thread that writes it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.changed = threading.Condition()
        self.waiting: deque[_Job] = deque()
        self.bytes = 0  # of what waits and what is being written
        self.given = self.done = 0  # numbers of the newest job, and of the last one that is over
        self.thread: threading.Thread | None = None
        self.closed = False

    def run(self) -> None:
        """Do what comes, until the queue is closed and empty."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.closed)
                if not self.waiting:
                    return
                job = self.waiting.popleft()
            try:
                job.work()
            except BaseException as error:  # noqa: BLE001 - what waits must go on; a panic of obstore is no Exception
                job.owner.job_failed(job, error)
            with self.changed:
                self.done = job.number
                job.owner.count(-1, -job.nbytes)
                self.changed.notify_all()


class WriteBehind:
    """Stores blocks in tiers, in a thread that starts with the first block and stops when closed."""

    def __init__(
        self,
        queue: WriteQueue,
        *,
        owns_queue: bool,
        streams: Streams,
        failed: Callable[[Tier, BaseException], None],
        tried: Callable[[KVBlock, bool], None],
        offered: Callable[[Tier, KVBlock, PutOutcome], None],
    ) -> None:
        """``failed`` is told what a tier raised; ``tried`` whether a block is now in all tiers it was meant for.

        ``offered`` is told what each tier made of it.

        Tenants share one queue; each waits for and forgets only its own blocks. The queue ends with its owner.
        """
        self._queue = queue
        self._owns_queue = owns_queue
        self._streams = streams
        self._failed, self._tried, self._offered = failed, tried, offered
        self._bytes = self._jobs = 0  # of this tenant's jobs in the queue
        self._closed = False
        self._told = False

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the blocks that are not written yet."""
        with self._queue.changed:
            return self._bytes

    def offer(self, block: KVBlock, tiers: Sequence[Tier]) -> bool:
        """Take ``block`` to be stored in ``tiers``; False if too much waits already."""
        with self._queue.changed:
            if self._queue.bytes and self._queue.bytes + block.nbytes > self._queue.max_bytes:
                return False
            return self._give(block.nbytes, tiers, lambda: self._store(block, tiers))

    def note(self, tier: Tier, work: Callable[[], None]) -> None:
        """Tell ``tier`` something when its turn comes, if not too much waits already."""
        with self._queue.changed:
            if len(self._queue.waiting) < _MAX_NOTES:
                self._give(0, [tier], work)

    def wait(self) -> None:
        """Return once all that was taken so far is done."""
        queue = self._queue
        with queue.changed:
            last = queue.given
            queue.changed.wait_for(lambda: queue.done >= last or not self._jobs)

    def forget(self) -> None:
        """Drop what waits, and return once what was being written is."""
        queue = self._queue
        with queue.changed:
            dropped = [job for job in queue.waiting if job.owner is self]
            self.count(-len(dropped), -sum(job.nbytes for job in dropped))
            queue.waiting = deque(job for job in queue.waiting if job.owner is not self)
            queue.changed.notify_all()
            queue.changed.wait_for(lambda: not self._jobs)

    def close(self) -> None:
        """Do what waits, then stop; the thread stops with the one it was made for."""
        queue = self._queue
        with queue.changed:
            self._closed = True
            queue.closed = queue.closed or self._owns_queue
            queue.changed.notify_all()
        if not self._owns_queue:
            self.wait()
        elif queue.thread is not None:
            queue.thread.join()

    def job_failed(self, job: _Job, error: BaseException) -> None:
        """A job raised what it should not have: its tiers count it, the first time is logged."""
        self._log_once(error)
        for tier in job.tiers:
            self._tell(tier, error)

    def _tell(self, tier: Tier, error: BaseException) -> None:
        """A tier failed. Whatever comes of telling ends here, a warning where warnings are errors most of all."""
        try:
            self._failed(tier, error)
        except Exception as raised:  # noqa: BLE001 - the other tiers get the block, and the thread goes on
            self._log_once(raised)

    def _log_once(self, error: BaseException) -> None:
        if not self._told:
            self._told = True
            _log.error("writing behind failed; later jobs go on, and more failures are only counted", exc_info=error)

    def _give(self, nbytes: int, tiers: Sequence[Tier], work: Callable[[], None]) -> bool:
        queue = self._queue
        if self._closed or queue.closed:
            return False
        if queue.thread is None:
            thread = threading.Thread(target=queue.run, name="kvboost-write-behind", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the machine has none left: the next job tries again
                return False
            queue.thread = thread
        self.count(1, nbytes)
        queue.given += 1
        queue.waiting.append(_Job(queue.given, self, nbytes, tiers, work))
        queue.changed.notify_all()
        return True

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
                    self._tell(tier, error)
        finally:
            self._tried(block, kept == len(tiers))

    def count(self, jobs: int, nbytes: int) -> None:
        """Jobs and bytes came or went; the queue's condition is held."""
        self._jobs += jobs
        self._bytes += nbytes
        self._queue.bytes += nbytes
