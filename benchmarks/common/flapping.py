"""A Redis that fails again and again: killed, unreachable, silent, slow or talking nonsense.

Used by the soak. Invariant: while it is told to be steady, and at the end, nothing is wrong with it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.common.faults import Fault, FaultyProxy
from benchmarks.common.servers import free_port, redis_server

_FAULT_SECONDS = 15.0
_FAULTS = (Fault.REFUSED, Fault.BLACK_HOLE, Fault.SLOW, Fault.RESET, Fault.GARBAGE, Fault.LATE, Fault.TRUNCATED)


class FlappingRedis:
    """A redis-server behind a proxy; every other period something is wrong with one of them."""

    def __init__(self, stack: ExitStack, options: Sequence[str] = ()) -> None:
        self._port, self._options = free_port(), options
        self._server = ExitStack()
        self._server.enter_context(redis_server(options, port=self._port))
        stack.callback(self._server.close)
        self._proxy = stack.enter_context(FaultyProxy(self._port))
        self._steady = threading.Event()
        self._over = threading.Event()
        self.faults: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._flap)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the server under test finds it."""
        return f"redis://127.0.0.1:{self._proxy.port}/0"

    def steady(self, steady: bool) -> None:
        """Whether nothing goes wrong for a while."""
        if steady:
            self._steady.set()
            while self._proxy.fault is not Fault.NONE:
                time.sleep(0.05)
        else:
            self._steady.clear()

    def end(self) -> None:
        """No more faults."""
        self._over.set()
        self._steady.set()
        self._thread.join()

    def _flap(self) -> None:
        number = 0
        while not self._over.wait(_FAULT_SECONDS):
            if self._steady.is_set():
                continue
            fault = _FAULTS[number % len(_FAULTS)]
            number += 1
            self.faults[fault.value] += 1
            self._proxy.fault = fault
            if fault is Fault.REFUSED:  # and all it held is gone
                self._server.close()
            self._steady.wait(_FAULT_SECONDS)
            if fault is Fault.REFUSED:
                self._server.enter_context(redis_server(self._options, port=self._port))
            self._proxy.fault = Fault.NONE
