"""A Redis or Valkey server as one tier sees it: a pool of links behind a breaker.

Used by the Redis tier, and for each node of a cluster. :mod:`kvboost.store.tiers.redis.connecting` makes the
connections; what is said over them is :mod:`kvboost.store.tiers.redis.resp`'s. Invariants: a caller waits for a link no
longer than its deadline, whatever name lookup, connecting or TLS do, as that happens in another thread; a link that
failed is never used again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvboost.store.tiers.breaker import Breaker
from kvboost.store.tiers.redis.connecting import CONNECT_TIMEOUT_S, Connector
from kvboost.store.tiers.redis.resp import Deadline, Link, ProtocolError, ServerError

PREFIX = "kvboost"
"""Of all keys, as the tiers of engines have it."""
_ELSEWHERE = ("MOVED", "ASK", "CLUSTERDOWN", "READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN")  # is who is in charge
_ECHO_BYTES = 16 * 1024
_MAX_IDLE = 8


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a lookup waits: some time, and what its bytes would take at the slowest rate."""

    timeout_s: float
    min_bytes_per_s: float


class UnavailableError(Exception):
    """The server cannot be used now. ``cause`` is None if that was known before."""

    def __init__(self, cause: Exception | None) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Server:
    """The links to one server. Thread-safe."""

    def __init__(
        self,
        connector: Connector,
        *,
        patience: Patience,
        failed: Callable[[], None] | None = None,
    ) -> None:
        """Connects only when asked. ``failed`` is told when it did not do what it was asked to: another may be in
        charge."""
        self._connector = connector
        self.prefix = connector.prefix
        """Of all keys there."""
        self._patience = patience
        self._failed = failed
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._closed = False
        self.breaker = Breaker(self._probe, name="kvboost-redis-probe")

    def deadline(self, seconds: float | None = None) -> Deadline:
        """For one call: the usual, or so many seconds."""
        patience = self._patience
        return Deadline(patience.timeout_s if seconds is None else seconds, min_bytes_per_s=patience.min_bytes_per_s)

    @contextmanager
    def link(self, deadline: Deadline) -> Iterator[Link]:
        """A link for one use. Raises UnavailableError, also for what goes wrong with the link while it is used."""
        if self.breaker.is_open:
            raise UnavailableError(None)
        link: Link | None = None
        clean = False
        try:
            link = self._take_idle() or self._connected(deadline)
            link.deadline = deadline
            yield link
            clean = link.awaited == 0
        except ServerError as error:
            if str(error).startswith(_ELSEWHERE):
                self._tell()
                if self._connector.may_move:
                    self.breaker.failed()
                    self._drop_idle()
            raise UnavailableError(error) from error
        except (OSError, ProtocolError) as error:
            self.breaker.failed()
            self._drop_idle()
            self._tell()
            raise UnavailableError(error) from error
        finally:
            if link is not None:
                self._give_back(link, clean)

    def _tell(self) -> None:
        if self._failed is not None:
            self._failed()

    def close(self) -> None:
        """Close every link."""
        self.breaker.close()
        with self._lock:
            self._closed = True
        self._drop_idle()

    def _take_idle(self) -> Link | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                link = self._idle.pop()
            if link.is_fresh:
                return link
            link.close()

    def _give_back(self, link: Link, clean: bool) -> None:
        with self._lock:
            keep = clean and not self._closed and len(self._idle) < _MAX_IDLE
            if keep:
                self._idle.append(link)
        if not keep:
            link.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _connected(self, deadline: Deadline) -> Link:
        """A new link. One that comes too late is kept for the next caller."""
        done = threading.Event()
        lock = threading.Lock()
        made: list[Link] = []
        errors: list[Exception] = []
        given_up = False

        def connect() -> None:
            try:
                link = self._connect()
                with lock:
                    if not given_up:
                        made.append(link)
                        return
                self._give_back(link, True)
            except (OSError, ProtocolError) as error:
                errors.append(error)
            finally:
                done.set()

        threading.Thread(target=connect, name="kvboost-redis-connect", daemon=True).start()
        begin = time.monotonic()
        done.wait(deadline.left)
        deadline.waited(time.monotonic() - begin)
        with lock:
            given_up = True
        if made:
            return made[0]
        raise errors[0] if errors else TimeoutError("no connection in time")

    def _connect(self) -> Link:
        """Raises OSError or ProtocolError."""
        link, greeting = self._connector.connect(self.deadline(CONNECT_TIMEOUT_S))
        try:
            for reply in link.call(greeting):
                if isinstance(reply, ServerError):
                    raise ConnectionRefusedError(str(reply))
        except (OSError, ProtocolError):
            link.close()
            raise
        return link

    def _probe(self) -> bool:
        """Whether a new link carries some bytes there and back as fast as a request must have them."""
        payload = os.urandom(_ECHO_BYTES)
        try:
            link = self._connect()
        except (OSError, ProtocolError):
            return False
        try:
            link.deadline = self.deadline()
            well = link.call([(b"ECHO", payload)]) == [payload]
        except (OSError, ProtocolError):
            well = False
        self._give_back(link, well)
        return well
