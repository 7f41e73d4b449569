"""One HTTP connection, bounded: in time while headers come and while an answer is not read, and in number.

Given to uvicorn as its protocol, which itself bounds none of them. Invariants: a client that is slow or silent holds a
connection for ``header_seconds`` at most, unless a request of its own is being answered; one that does not read its
answer is cut off after ``write_seconds``, which cancels its jobs as if it had gone away; connections on which nothing
is answered keep nobody out.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvboost.serve.security.limits import Limits

_MIN_READ = 16 * 2**10  # bytes a client must take in write_seconds: fewer would let a trickle hold a job for hours


def bounded_connection(limits: Limits) -> type[H11Protocol]:
    """The protocol class for these limits."""
    idle: dict[BoundedConnection, None] = {}  # on which nothing is answered, the longest idle first

    def close_longest_idle() -> bool:
        """Make room. False if there is no such connection."""
        while idle:
            connection = next(iter(idle))
            del idle[connection]
            if not connection.transport.is_closing():
                connection.transport.abort()
                return True
        return False

    class BoundedConnection(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        @property
        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # Whose keys they have is not known yet: whoever is silent goes first.
            if len(self.connections) > limits.max_connections and not close_longest_idle():
                transport.abort()
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
            if self.conn.trailing_data[0]:  # the beginning of another request came along with the last one
                self._update_header_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            self._stop_write_timer()
            idle.pop(self, None)
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start_write_timer()

        def resume_writing(self) -> None:
            self._stop_write_timer()
            super().resume_writing()

        def _update_idle(self) -> None:
            """Bytes that are no whole request do not make it younger."""
            if self._answering or self.transport.is_closing():
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
                self.transport.abort()  # closing would wait for the same reader
            else:
                self._start_write_timer()

        def _update_header_timer(self) -> None:
            """The clock runs from the first byte of a request's headers to their last, and before the first request."""
            if self._answering or self.transport.is_closing():
                self._stop_header_timer()
            elif self._header_timer is None:
                self._header_timer = self.loop.call_later(limits.header_seconds, self._headers_late)

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _headers_late(self) -> None:
            self._header_timer = None
            if not self._answering:
                self.transport.close()

    return BoundedConnection
