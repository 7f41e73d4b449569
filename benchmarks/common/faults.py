"""A TCP proxy that breaks what passes through it: one fault at a time, also on connections that are open already.

Used by the Redis benchmark and by the tests of tiers behind a network.
"""

from __future__ import annotations

import enum
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

_CHUNK = 64 * 1024
_DRIBBLE_S = 0.005
_LATE_S = 0.25
_LARGE = 16 * 1024  # bytes read at once; of a record, not of an answer whether there is one


class Fault(enum.Enum):
    """What the proxy does to replies."""

    NONE = "none"
    REFUSED = "refused"
    """Nobody listens; open connections are reset."""
    BLACK_HOLE = "black hole"
    """Connections are taken, and nothing comes back."""
    SLOW = "slow"
    """Replies dribble, a byte every few milliseconds."""
    LATE = "late"
    """Replies come whole, a quarter of a second later."""
    TRUNCATED = "truncated"
    """The connection ends in the middle of a reply."""
    RESET = "reset"
    """The connection is reset in the middle of a reply."""
    GARBAGE = "garbage"
    """Random bytes instead of replies."""
    DIES = "dies in mid-load"
    """All goes well until a large reply: it ends in its middle, and from then on nobody listens."""


class FaultyProxy:
    """Stands before a server on this machine. A context manager; :attr:`fault` may be set at any time."""

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._fault = Fault.NONE
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._ended = False
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]

    @property
    def fault(self) -> Fault:
        """The fault that is in force."""
        return self._fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        before, self._fault = self._fault, fault
        if fault is Fault.REFUSED:
            self._stop_listening()
            self._drop_all()
        elif before is Fault.REFUSED:
            self._listener = self._listen(self.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._stop_listening()
        self._drop_all()

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port), backlog=64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _drop_all(self) -> None:
        with self._lock:
            links = list(self._open)
        for link in links:
            _reset(link)

    def _accept(self, listener: socket.socket) -> None:
        while not self._ended:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            for pump in (self._forward, self._reply):
                threading.Thread(target=pump, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(_CHUNK):
                server.sendall(data)
        self._end(client, server)

    def _reply(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(_CHUNK):
                if not self._pass(data, client):
                    break
        self._end(client, server)

    def _pass(self, data: bytes, client: socket.socket) -> bool:
        """Hand a piece of a reply on, as the fault has it. False if the connection is to be closed."""
        fault = self._fault
        if fault is Fault.SLOW:
            for at in range(len(data)):
                if self._fault is not Fault.SLOW:
                    client.sendall(data[at:])
                    break
                client.sendall(data[at : at + 1])
                time.sleep(_DRIBBLE_S)
        elif fault is Fault.LATE:
            time.sleep(_LATE_S)
            client.sendall(data)
        elif fault in (Fault.TRUNCATED, Fault.RESET):
            client.sendall(data[: len(data) // 2])
            if fault is Fault.RESET:
                _reset(client)
            return False
        elif fault is Fault.GARBAGE:
            client.sendall(os.urandom(len(data)))
        elif fault is Fault.DIES and len(data) >= _LARGE:
            client.sendall(data[: len(data) // 2])
            self.fault = Fault.REFUSED
            return False
        elif fault in (Fault.NONE, Fault.DIES):
            client.sendall(data)
        return True  # in a black hole, nothing of it

    def _end(self, *links: socket.socket) -> None:
        for link in links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            with self._lock:
                if link not in self._open:
                    continue
                self._open.discard(link)
            link.close()


def _reset(link: socket.socket) -> None:
    """Close with a reset instead of an orderly end."""
    with suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.shutdown(socket.SHUT_RDWR)
