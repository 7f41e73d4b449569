"""One HTTP connection, bounded: in time while headers come and while an answer is not read, and in number.

Given to uvicorn as its protocol, which itself bounds none of them. Invariants: a client that is slow or silent holds a
connection for ``header_seconds`` at most, unless a request of its own is being answered; one that does not read its
answer is cut off after ``write_seconds``, which cancels its jobs as if it had gone away; connections on which nothing
is answered, as a handshake or a body is not complete, keep nobody out and do not hold the server when it stops.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvboost.serve.security.limits import Limits

_MIN_READ = 16 * 2**10  # bytes a client must take in write_seconds: fewer would let a trickle hold a job for hours


def bounded_connection(limits: Limits, tls: ssl.SSLContext | None = None) -> Any:
    """What makes uvicorn's protocols, for these limits."""
    idle: dict[BoundedConnection | Handshake, None] = {}  # on which nothing is answered, the longest idle first

    def close_longest_idle() -> bool:
        """Make room. False if there is no such connection."""
        if not idle:
            return False
        connection = next(iter(idle))
        del idle[connection]
        connection.wire.abort()  # also one that is closing: with TLS it waits for the client, half a minute
        return True

    def is_one_too_many(connections: set[Any]) -> bool:
        """Whose keys they have is not known yet: whoever is silent goes first."""
        return len(connections) > limits.max_connections and not close_longest_idle()

    class BoundedConnection(H11Protocol):
        handshake: Handshake | None = None
        wire: Any = None  # the socket's own transport: that of TLS may forget how to abort once it was told to close
        _header_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        @property
        def _asked(self) -> bool:
            """A request has begun, and is not answered."""
            return self.cycle is not None and not self.cycle.response_complete

        @property
        def _answering(self) -> bool:
            """A request is here as a whole, and is not answered."""
            return self._asked and not self.cycle.more_body

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.wire = transport
            if self.handshake is not None:
                self.handshake.forget()
                self.wire = self.handshake.wire
            if is_one_too_many(self.connections):
                self.wire.abort()
                return
            # So that writing pauses as soon as the client lags behind. TLS takes 0 for always.
            transport.set_write_buffer_limits(high=0 if transport.get_extra_info("sslcontext") is None else 1)
            self._update_header_timer()
            self._update_idle()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update_header_timer()
            self._update_idle()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._update_idle()
            # Its body is still to come, as clients send it apart, or the beginning of another request came with it.
            if self.cycle.more_body or self.conn.trailing_data[0]:
                self._update_header_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            self._stop_write_timer()
            idle.pop(self, None)
            super().connection_lost(exc)

        def shutdown(self) -> None:
            super().shutdown()
            # Closing alone would wait for the end of a body, and with TLS for a word of the client's.
            if not self._answering and not self.wire.get_write_buffer_size():
                self.wire.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start_write_timer()

        def resume_writing(self) -> None:
            self._stop_write_timer()
            super().resume_writing()

        def _update_idle(self) -> None:
            """Bytes that are no whole request do not make it younger."""
            if self._answering:
                idle.pop(self, None)
            else:
                idle.setdefault(self)

        def _start_write_timer(self) -> None:
            waiting = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(limits.write_seconds, self._check_written, waiting)

        def _stop_write_timer(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

        def _check_written(self, waiting: int) -> None:
            if waiting - self.transport.get_write_buffer_size() < _MIN_READ:
                self.wire.abort()  # closing would wait for the same reader
            else:
                self._start_write_timer()

        def _update_header_timer(self) -> None:
            """The clock runs from the first byte of a request's headers to their last, and before the first request."""
            if self._asked or self.transport.is_closing():
                self._stop_header_timer()
            elif self._header_timer is None:
                self._header_timer = self.loop.call_later(limits.header_seconds, self._headers_late)

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _headers_late(self) -> None:
            self._header_timer = None
            if not self._asked:
                self.wire.abort()

    class Handshake(SSLProtocol):
        """asyncio's TLS, which uvicorn counts and closes like a connection.

        By itself uvicorn knows of no connection before its handshake is over, and gives asyncio no limit for that.
        """

        max_size = 16 * 2**10  # of a buffer that each has, from the first; asyncio's are 256 KiB

        def __init__(self, connection: BoundedConnection) -> None:
            # What asyncio takes: its stubs know neither seconds with a fraction nor that nobody may wait.
            rest: Any = {"sslcontext": tls, "waiter": None, "ssl_handshake_timeout": limits.header_seconds}
            super().__init__(connection.loop, connection, server_side=True, **rest)
            self._connections: set[Any] = connection.connections

        def connection_made(self, transport: Any) -> None:
            self.wire = transport
            self._connections.add(self)
            if is_one_too_many(self._connections):
                transport.abort()
                return
            idle[self] = None
            super().connection_made(transport)

        def connection_lost(self, exc: BaseException | None) -> None:
            self.forget()
            super().connection_lost(exc)

        def forget(self) -> None:
            """It is over, and the connection it was for counts instead, or it failed."""
            self._connections.discard(self)
            idle.pop(self, None)

        def shutdown(self) -> None:
            self.wire.abort()

    def handshake(**given: Any) -> Handshake:
        connection = BoundedConnection(**given)
        connection.handshake = made = Handshake(connection)
        return made

    return BoundedConnection if tls is None else handshake
