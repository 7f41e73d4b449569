"""One HTTP connection, bounded: in time while headers come and while an answer is not read, and in number.

Given to uvicorn as its protocol, which itself bounds none of them. Invariants: a client that is slow or silent holds a
connection for ``header_seconds`` at most, unless a request of its own is being answered; one that does not read its
answer is cut off after ``write_seconds``, which cancels its jobs as if it had gone away.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvboost.serve.security.limits import Limits

_MIN_READ = 16 * 2**10  # bytes in write_seconds of those that wait: fewer would let a trickle hold a job for hours


def bounded_connection(limits: Limits) -> type[H11Protocol]:
    """The protocol class for these limits."""

    class BoundedConnection(H11Protocol):
        _waiting_for_headers: asyncio.TimerHandle | None = None
        _waiting_for_reader: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.max_connections:
                transport.abort()
                return
            transport.set_write_buffer_limits(high=0)  # so that writing pauses as soon as the client lags behind
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.trailing_data[0]:  # the beginning of another request came along with the last one
                self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            self._reader_is_there()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._expect_reader()

        def resume_writing(self) -> None:
            self._reader_is_there()
            super().resume_writing()

        def _expect_reader(self) -> None:
            waiting = self.transport.get_write_buffer_size()
            self._waiting_for_reader = self.loop.call_later(limits.write_seconds, self._look_for_reader, waiting)

        def _reader_is_there(self) -> None:
            if self._waiting_for_reader is not None:
                self._waiting_for_reader.cancel()
                self._waiting_for_reader = None

        def _look_for_reader(self, waiting: int) -> None:
            if waiting - self.transport.get_write_buffer_size() < _MIN_READ:
                self.transport.abort()  # closing would wait for the same reader
            else:
                self._expect_reader()

        def _watch(self) -> None:
            """The clock runs from the first byte of a request's headers to their last, and before the first request."""
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering or self.transport.is_closing():
                self._unwatch()
            elif self._waiting_for_headers is None:
                self._waiting_for_headers = self.loop.call_later(limits.header_seconds, self._too_slow)

        def _unwatch(self) -> None:
            if self._waiting_for_headers is not None:
                self._waiting_for_headers.cancel()
                self._waiting_for_headers = None

        def _too_slow(self) -> None:
            self._waiting_for_headers = None
            answering = self.cycle is not None and not self.cycle.response_complete
            if not answering:
                self.transport.close()

    return BoundedConnection
