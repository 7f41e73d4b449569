"""The Redis protocol (RESP2) over one connected socket, without copies: values go out from where they lie and come
in where they are wanted.

Used by :mod:`kvboost.store.tiers.redis.server`; redis-py makes the connection. Invariants: no use waits longer than
its :class:`Deadline`; no length that the server names is believed beyond the caller's limit; after an error the link
is of no more use.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Value: TypeAlias = bytes | memoryview | tuple[memoryview, ...]
"""An argument of a command; a tuple is one value in several pieces."""
Command: TypeAlias = Sequence[Value]
Reply: TypeAlias = "int | bytes | ServerError | list[Reply] | None"

_BUFFER_BYTES = 16 * 1024  # for the lines between values; values go past it
_COPIED_BELOW = 4096  # smaller pieces are sent together
_MAX_PIECES = 256  # in one system call
_MAX_LINE_BYTES = 8 * 1024
_MAX_ITEMS = 2**20
_MAX_DEPTH = 4
SMALL_BYTES = 2**20
"""The largest value that :meth:`Link.reply` takes. Larger ones are asked for with :meth:`Link.length`."""


class ServerError(Exception):
    """The server understood and said no."""


class ProtocolError(Exception):
    """What came is no reply."""


class Deadline:
    """How long one caller still waits: some time, and what the bytes that did come would take at the slowest rate.

    So a stalled or dribbling server is given up after that time, however much was asked of it. Only waiting counts, and
    not what the caller does between; nor a wait that ended well after its limit, as then this process was held up.
    """

    def __init__(self, seconds: float, *, min_bytes_per_s: float) -> None:
        self.left = seconds
        """Seconds; zero when it is over."""
        self._per_byte = 1.0 / min_bytes_per_s

    def waited(self, seconds: float) -> None:
        """So long was waited, and something came of it."""
        if seconds <= self.left:
            self.left -= seconds

    def transferred(self, count: int) -> None:
        """So many bytes came or went."""
        self.left += count * self._per_byte


class Link:
    """One connection. Not thread-safe. Every method may raise OSError, ProtocolError or ServerError."""

    def __init__(self, connected: socket.socket, deadline: Deadline, *, owner: object = None) -> None:
        """``deadline`` is of the first use; ``owner`` is kept alive as long as the link."""
        self._socket = connected
        self._owner = owner
        self._gathers = not isinstance(connected, ssl.SSLSocket)
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0
        self.deadline = deadline
        """Of the present use."""
        self.awaited = 0
        """Replies that were asked for and not read."""

    @property
    def is_fresh(self) -> bool:
        """Whether nothing came that was not asked for, not even the end. Read between uses."""
        if self.awaited or self._begin < self._end:
            return False
        try:
            self._socket.settimeout(0.0)
            self._socket.recv_into(self._buffer[:1])
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def call(self, commands: Sequence[Command]) -> list[Reply]:
        """The replies to some commands, in one round trip. A refusal is returned in its place, not raised."""
        self.send(commands)
        return [self.reply() for _ in commands]

    def send(self, commands: Iterable[Command]) -> None:
        """Ask without waiting for the replies."""
        pieces: list[memoryview] = []
        small = bytearray()
        for command in commands:
            self.awaited += 1
            small += b"*%d\r\n" % len(command)
            for value in command:
                parts = value if isinstance(value, tuple) else (value,)
                small += b"$%d\r\n" % sum(map(len, parts))
                for part in parts:
                    if len(part) < _COPIED_BELOW:
                        small += part
                    else:
                        pieces += (memoryview(small), memoryview(part))
                        small = bytearray()
                small += b"\r\n"
        pieces.append(memoryview(small))
        if self._gathers:
            self._send_gathered(pieces)
        else:
            for piece in pieces:
                self._socket.settimeout(max(self.deadline.left, 1e-3))
                begin = time.monotonic()
                self._socket.sendall(piece)
                self.deadline.waited(time.monotonic() - begin)
                self.deadline.transferred(len(piece))

    def _send_gathered(self, pieces: list[memoryview]) -> None:
        at = 0
        while at < len(pieces):
            self._socket.settimeout(self.deadline.left)
            begin = time.monotonic()
            try:
                sent = self._socket.sendmsg(pieces[at : at + _MAX_PIECES])
            except BlockingIOError as error:
                raise TimeoutError("the server does not take what it is sent") from error
            self.deadline.waited(time.monotonic() - begin)
            self.deadline.transferred(sent)
            while at < len(pieces) and sent >= len(pieces[at]):
                sent -= len(pieces[at])
                at += 1
            if sent:
                pieces[at] = pieces[at][sent:]

    def reply(self) -> Reply:
        """The next reply. Values in it are copied and may have :data:`SMALL_BYTES`."""
        self.awaited -= 1
        return self._reply(0)

    def _reply(self, depth: int) -> Reply:
        kind, rest = self._line()
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest.decode("utf-8", "replace"))
        number = _number(rest)
        if kind == b":":
            return number
        if number == -1 and kind in b"$*":
            return None
        if kind == b"$" and 0 <= number <= SMALL_BYTES:
            value = bytearray(number)
            self._take(memoryview(value))
            return bytes(value)
        if kind == b"*" and 0 <= number <= _MAX_ITEMS and depth < _MAX_DEPTH:
            return [self._reply(depth + 1) for _ in range(number)]
        raise ProtocolError(f"a reply that begins with {kind + rest[:20]!r}")

    def length(self) -> int | None:
        """The length of the value that comes next, to be taken with :meth:`take`; None if there is none."""
        self.awaited -= 1
        kind, rest = self._line()
        if kind == b"-":
            raise ServerError(rest.decode("utf-8", "replace"))
        number = _number(rest)
        if kind != b"$" or number < -1:
            raise ProtocolError(f"a reply that begins with {kind + rest[:20]!r} instead of a value")
        return None if number == -1 else number

    def take(self, into: memoryview) -> None:
        """Read the value whose length was given, all of it, into this memory."""
        self._take(into)

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._socket.close()
        self._owner = None

    def _take(self, into: memoryview) -> None:
        at = min(len(into), self._end - self._begin)
        into[:at] = self._buffer[self._begin : self._begin + at]
        self._begin += at
        while at < len(into):
            at += self._receive(into[at:])
        while self._end - self._begin < 2:
            self._more()
        if bytes(self._buffer[self._begin : self._begin + 2]) != b"\r\n":
            raise ProtocolError("a value that does not end where it said")
        self._begin += 2

    def _line(self) -> tuple[bytes, bytes]:
        """The first byte of the next line and the others."""
        searched = 0
        while True:
            held = bytes(self._buffer[self._begin : self._end])
            at = held.find(b"\r\n", max(0, searched - 1))
            if at > 0:
                self._begin += at + 2
                return held[:1], held[1:at]
            if at == 0 or len(held) > _MAX_LINE_BYTES:
                raise ProtocolError(f"a reply that begins with {held[:20]!r}")
            searched = len(held)
            self._more()

    def _more(self) -> None:
        """Read more lines into the buffer."""
        held = self._end - self._begin
        if self._begin:
            self._buffer[:held] = bytes(self._buffer[self._begin : self._end])
            self._begin, self._end = 0, held
        self._end += self._receive(self._buffer[held:])

    def _receive(self, into: memoryview) -> int:
        self._socket.settimeout(self.deadline.left)  # zero: what lies here already is still taken
        begin = time.monotonic()
        try:
            count = self._socket.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError) as error:
            raise TimeoutError("timed out") from error
        if not count:
            raise ConnectionResetError("the server closed the connection")
        self.deadline.waited(time.monotonic() - begin)
        self.deadline.transferred(count)
        return count


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 18:
        raise ProtocolError(f"{text[:20]!r} where a number should be")
    return int(text)
