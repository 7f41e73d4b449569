"""Writes blocks to slower tiers behind the request's back, in order, with a bound on what waits.

Used by :class:`kvboost.store.tiered.TieredStore`. Invariants: what waits never takes more than the bound; a block
that is not taken is told to the caller at once; after :meth:`WriteBehind.wait` everything taken before was offered to
its tiers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvboost.extend import Tier
from kvboost.types import KVBlock

_Job = tuple[KVBlock, Sequence[Tier]]


class WriteBehind:
    """One thread that stores blocks in tiers. Starts with the first block; stops when closed."""

    def __init__(self, *, most_bytes: int, failed: Callable[[Tier, Exception], None]) -> None:
        """``failed`` is told what a tier raised; the others still get the block."""
        self._most_bytes = most_bytes
        self._failed = failed
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._bytes = 0  # of what waits and what is being written
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the blocks that are not written yet."""
        with self._changed:
            return self._bytes

    def offer(self, block: KVBlock, tiers: Sequence[Tier]) -> bool:
        """Take ``block`` to be stored in ``tiers``; False if too much waits already."""
        with self._changed:
            if self._closed or self._bytes + block.nbytes > self._most_bytes:
                return False
            self._bytes += block.nbytes
            self._waiting.append((block, tiers))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvboost-write-behind", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def wait(self) -> None:
        """Return once nothing waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes == 0)

    def forget(self) -> None:
        """Drop what waits, and return once what was being written is."""
        with self._changed:
            self._bytes -= sum(block.nbytes for block, _ in self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._bytes == 0)

    def close(self) -> None:
        """Write what waits, then stop."""
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
                block, tiers = self._waiting.popleft()
            for tier in tiers:
                try:
                    tier.store(block)
                except Exception as error:  # noqa: BLE001 - whatever a tier raises, the others get the block
                    self._failed(tier, error)
            with self._changed:
                self._bytes -= block.nbytes
                self._changed.notify_all()
