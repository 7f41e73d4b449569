"""Blocks on their way from a server: received in a thread ahead of the reader, checked by the reader.

Used by the Redis tier. Invariants: every load ends, with a miss for what did not come; a load that is given up, even
before its first block, ends its thread.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvboost.direct_io import page_aligned
from kvboost.errors import RecordError
from kvboost.store.record.header import MAX_HEADER_BYTES, read_header
from kvboost.store.tiers.redis.ledger import Ledger
from kvboost.store.tiers.redis.resp import Link, ServerError
from kvboost.store.tiers.redis.server import Server, UnavailableError

PIECE_BYTES = 2**20 - 64
"""The largest value: with what Redis adds, a megabyte of its allocator's; 64 more would take a quarter more."""

_AHEAD = 3  # values asked for at once: of more, the server would keep copies
_WAITING = 2  # records that wait for the reader
_DAMAGED = memoryview(b"")


class OversizedValueError(ServerError):
    """A value that none of us wrote, and too long to be read."""

    def __init__(self, key: bytes, length: int) -> None:
        super().__init__(f"a value of {length:,} bytes")
        self.key = key


def split(parts: Sequence[memoryview], nbytes: int, size: int = PIECE_BYTES) -> list[tuple[memoryview, ...]]:
    """The pieces of a record: one, or the header and then its layers, so many as make ``size`` bytes in each."""
    if nbytes <= size:
        return [tuple(parts)]
    pieces: list[tuple[memoryview, ...]] = [(parts[0],)]
    group: list[memoryview] = []
    left = size
    for part in parts[1:]:
        while len(part):
            group.append(part[:left])
            part = part[left:]
            left -= len(group[-1])
            if not left:
                pieces.append(tuple(group))
                group, left = [], size
    if group:
        pieces.append(tuple(group))
    return pieces


@dataclass(frozen=True, slots=True)
class _Header:
    """The first piece of a record whose other pieces must be asked for."""

    key: bytes
    data: memoryview
    record_bytes: int
    seal: bytes

    @property
    def lengths(self) -> list[int]:
        """Of the other pieces."""
        rest = self.record_bytes - len(self.data)
        return [min(PIECE_BYTES, rest - at) for at in range(0, rest, PIECE_BYTES)]


def seal_name(seal: bytes) -> bytes:
    """What the pieces of one writing of a record have in their names: another writing has others."""
    return seal[:8].hex().encode()


def received(link: Link, keys: Sequence[bytes], *, ledger: Ledger, max_bytes: int) -> Iterator[memoryview | None]:
    """The records of these keys as they come, unchecked; None for one that is not there or not all there."""
    came: deque[memoryview | _Header | None] = deque()  # first pieces of the next records
    asked = 0
    for at, key in enumerate(keys):
        if came:
            first = came.popleft()
        else:
            ahead = keys[asked : at + _AHEAD]
            if ahead:
                link.send([(b"GET", ledger.value(other)) for other in ahead])
                asked += len(ahead)
            first = _first_piece(link, key, max_bytes)
        if isinstance(first, _Header):
            while link.awaited:  # they stand before the rest of this one
                came.append(_first_piece(link, keys[at + 1 + len(came)], max_bytes))
            yield _rest(link, first, ledger)
        else:
            yield first


def _first_piece(link: Link, key: bytes, max_bytes: int) -> memoryview | _Header | None:
    length = link.length()
    if length is None:
        return None
    if length > max(PIECE_BYTES, MAX_HEADER_BYTES):
        raise OversizedValueError(key, length)
    data = page_aligned(length)
    link.take(data)
    try:
        header = read_header(data, max_bytes)
    except RecordError:
        return data  # the reader will see it too
    if header.record_bytes > PIECE_BYTES and length == header.header_bytes:
        return _Header(key, data, header.record_bytes, seal_name(header.seal))
    return data


def _rest(link: Link, header: _Header, ledger: Ledger) -> memoryview | None:
    """The whole record, its pieces one behind the other."""
    record = page_aligned(header.record_bytes)
    at = len(header.data)
    record[:at] = header.data
    missing = damaged = False
    commands = deque(
        (b"GET", ledger.piece(header.key, header.seal, number)) for number in range(1, len(header.lengths) + 1)
    )
    for wanted in header.lengths:
        while commands and link.awaited < _AHEAD:
            link.send([commands.popleft()])
        length = link.length()
        if length is None:
            missing = True
        elif length == wanted:
            link.take(record[at : at + wanted])
        elif length <= PIECE_BYTES:
            link.take(page_aligned(length))
            damaged = True
        else:
            raise OversizedValueError(header.key, length)
        at += wanted
    return None if missing else _DAMAGED if damaged else record


class Loading:
    """The records of some keys, in order. ``unavailable`` is why the last ones did not come, if they did not."""

    def __init__(self, keys: Sequence[bytes], *, server: Server, ledger: Ledger, max_bytes: int) -> None:
        self._left = len(keys)
        self._queue: queue.Queue[memoryview | UnavailableError | None] = queue.Queue(_WAITING)
        self._stop = threading.Event()
        self.unavailable: UnavailableError | None = None
        if server.breaker.is_open:
            self.unavailable = UnavailableError(None)
        elif keys:

            def receive(link: Link) -> Iterator[memoryview | None]:
                return received(link, keys, ledger=ledger, max_bytes=max_bytes)

            arguments = (server, receive, self._queue, self._stop)  # not self: the thread must not keep it alive
            threading.Thread(target=_feed, args=arguments, name="kvboost-redis-load", daemon=True).start()

    def __iter__(self) -> Iterator[memoryview | None]:
        return self

    def __next__(self) -> memoryview | None:
        if not self._left:
            raise StopIteration
        self._left -= 1
        if self.unavailable is not None:
            return None
        item = self._queue.get()
        if isinstance(item, UnavailableError):
            self.unavailable = item
            return None
        return item

    def close(self) -> None:
        """Give up what has not come yet."""
        self._stop.set()
        while True:
            try:
                self._queue.get_nowait()  # so that the thread comes to see it
            except queue.Empty:
                return

    def __del__(self) -> None:
        self.close()


def _feed(
    server: Server,
    receive: Callable[[Link], Iterator[memoryview | None]],
    into: queue.Queue[memoryview | UnavailableError | None],
    stop: threading.Event,
) -> None:
    try:
        with server.link(server.deadline()) as link:
            for record in receive(link):
                into.put(record)
                if stop.is_set():
                    return
    except UnavailableError as error:
        into.put(error)
    except Exception as error:  # noqa: BLE001 - the reader would wait for ever
        into.put(UnavailableError(error))
