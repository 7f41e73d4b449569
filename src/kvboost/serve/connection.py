"""One HTTP connection, bounded: in time while headers come, and in number.

Given to uvicorn as its protocol, which itself bounds neither. Invariant: a client that is slow or silent holds a
connection for ``header_seconds`` at most, unless a request of its own is being answered.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvboost.serve.limits import Limits


def bounded_connection(limits: Limits) -> type[H11Protocol]:
    """The protocol class for these limits."""

    class BoundedConnection(H11Protocol):
        _waiting_for_headers: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
                return
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
            super().connection_lost(exc)

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
