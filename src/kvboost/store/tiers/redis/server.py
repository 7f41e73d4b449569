"""A Redis or Valkey server as one tier sees it: a pool of links behind a breaker.

Used by the Redis tier. :mod:`kvboost.store.tiers.redis.connecting` makes the connections; what is said over them is
:mod:`kvboost.store.tiers.redis.resp`'s. Invariants: a caller waits for a link no longer than its deadline,
whatever name lookup, connecting or TLS do, as that happens in another thread; a link that failed is never used again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvboost.store.tiers.breaker import Breaker
from kvboost.store.tiers.redis.connecting import CONNECT_TIMEOUT_S, connector, place_of
from kvboost.store.tiers.redis.resp import Deadline, Link, ProtocolError, ServerError

PREFIX = "kvboost"
"""Of all keys, as the tiers of engines have it."""
_ELSEWHERE = ("MOVED", "ASK", "CLUSTERDOWN", "READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN")  # is who is in charge
_ECHO_BYTES = 16 * 1024
_MAX_IDLE = 8


class UnavailableError(Exception):
    """The server cannot be used now. ``cause`` is None if that was known before."""

    def __init__(self, cause: Exception | None) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Server:
    """The links to one server. Thread-safe."""

    def __init__(self, url: str, *, timeout_s: float, min_bytes_per_s: float, prefix: str = PREFIX) -> None:
        """Raises ConfigError for an URL that cannot work or if redis-py is missing. Connects only when asked."""
        self._connector = connector(url, prefix=prefix)
        self.prefix = self._connector.prefix
        """Of all keys there."""
        self.place = place_of(url)
        """What to call it: never with a password."""
        self._timeout_s = timeout_s
        self._slowest = min_bytes_per_s
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._closed = False
        self.breaker = Breaker(self._probe, name="kvboost-redis-probe")

    def deadline(self, seconds: float | None = None) -> Deadline:
        """For one call: the usual, or so many seconds."""
        return Deadline(self._timeout_s if seconds is None else seconds, min_bytes_per_s=self._slowest)

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
            if self._connector.may_move and str(error).startswith(_ELSEWHERE):
                self.breaker.failed()
                self._drop_idle()
            raise UnavailableError(error) from error
        except (OSError, ProtocolError) as error:
            self.breaker.failed()
            self._drop_idle()
            raise UnavailableError(error) from error
        finally:
            if link is not None:
                self._give_back(link, clean)

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
