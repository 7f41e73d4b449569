"""Writes blocks to slower tiers behind the request's back, in order, with a bound on what waits.

Used by :class:`kvboost.store.tiered.TieredStore`. Invariants: what waits never takes more than the bound; a block
that is not taken is told to the caller at once; after :meth:`WriteBehind.wait` everything taken before was offered to
its tiers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvboost.extend import Tier
from kvboost.types import KVBlock


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    block: KVBlock
    tiers: Sequence[Tier]
    of: WriteBehind


class _Queue:
    """What waits, and the thread that writes it."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.changed = threading.Condition()
        self.waiting: deque[_Job] = deque()
        self.bytes = 0  # of what waits and what is being written
        self.thread: threading.Thread | None = None
        self.closed = False

    def run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.closed)
                if not self.waiting:
                    return
                job = self.waiting.popleft()
            for tier in job.tiers:
                try:
                    tier.store(job.block)
                except Exception as error:  # noqa: BLE001 - whatever a tier raises, the others get the block
                    job.of._failed(tier, error)
            with self.changed:
                job.of._count(-job.block.nbytes)
                self.changed.notify_all()


class WriteBehind:
    """One thread that stores blocks in tiers. Starts with the first block; stops when closed."""

    def __init__(self, *, most_bytes: int, failed: Callable[[Tier, Exception], None]) -> None:
        """``failed`` is told what a tier raised; the others still get the block."""
        self._queue = _Queue(most_bytes)
        self._failed = failed
        self._bytes = 0  # of the queue's, those offered here
        self._closed = False
        self._is_first = True

    def beside(self, *, failed: Callable[[Tier, Exception], None]) -> WriteBehind:
        """Another way into the same queue, for another tenant. It waits for and forgets only what came this way."""
        other = WriteBehind(most_bytes=self._queue.most_bytes, failed=failed)
        other._queue, other._is_first = self._queue, False
        return other

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the blocks that are not written yet."""
        with self._queue.changed:
            return self._bytes

    def offer(self, block: KVBlock, tiers: Sequence[Tier]) -> bool:
        """Take ``block`` to be stored in ``tiers``; False if too much waits already."""
        queue = self._queue
        with queue.changed:
            if self._closed or queue.closed or queue.bytes + block.nbytes > queue.most_bytes:
                return False
            self._count(block.nbytes)
            queue.waiting.append(_Job(block, tiers, self))
            if queue.thread is None:
                queue.thread = threading.Thread(target=queue.run, name="kvboost-write-behind", daemon=True)
                queue.thread.start()
            queue.changed.notify_all()
            return True

    def wait(self) -> None:
        """Return once nothing waits."""
        with self._queue.changed:
            self._queue.changed.wait_for(lambda: self._bytes == 0)

    def forget(self) -> None:
        """Drop what waits, and return once what was being written is."""
        queue = self._queue
        with queue.changed:
            self._count(-sum(job.block.nbytes for job in queue.waiting if job.of is self))
            queue.waiting = deque(job for job in queue.waiting if job.of is not self)
            queue.changed.notify_all()
            queue.changed.wait_for(lambda: self._bytes == 0)

    def close(self) -> None:
        """Write what waits, then stop; the thread stops with the one it was made for."""
        queue = self._queue
        with queue.changed:
            self._closed = True
            queue.closed = queue.closed or self._is_first
            queue.changed.notify_all()
        if not self._is_first:
            self.wait()
        elif queue.thread is not None:
            queue.thread.join()

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        self._queue.bytes += nbytes
