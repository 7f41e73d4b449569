"""Values in a Mooncake Store: the memory that the machines of a fleet give to it, over TCP or RDMA.

Used by the Redis tier for ``mooncake://``. A record is one value; its master evicts. Invariants: no request waits
longer than its patience for Mooncake's library, which has no time limits, as its calls run in a few threads of their
own; while those hang, nothing is asked; a request that found them busy is a miss, and no reason to leave it alone.

It cannot list its values, so they are not counted; a purge has the master remove them by the beginning of their names.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from kvboost.config import parse_bytes
from kvboost.direct_io import page_aligned
from kvboost.errors import ConfigError, with_extra
from kvboost.store.record.format import EncodedRecord
from kvboost.store.tiers.base import MAX_VARIANTS
from kvboost.store.tiers.remote import (
    BEHIND_S,
    Breaker,
    Call,
    Deadline,
    Guard,
    Patience,
    RefusedError,
    Report,
    UnavailableError,
)
from kvboost.types import PutOutcome

_READERS = 4
_BUFFER_BYTES = 256 * 2**20  # each transfer under way has its part of it
_LARGEST = _BUFFER_BYTES // (_READERS + 1)
_ALL_S = 30.0  # the master looks at every name
_UNREACHABLE = -900
_OPTIONS = {"segment", "protocol", "device"}

T = TypeVar("T")


class MooncakeURL(NamedTuple):
    """``mooncake://MASTER:PORT``."""

    master: str
    segment_bytes: int
    """Of this process's memory, given to the store; 0 where other processes do that."""
    protocol: str
    device: str
    """Names of RDMA devices; empty for TCP."""


def parse_mooncake(url: str) -> MooncakeURL:
    """What an URL says. Raises ConfigError for one that cannot work."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 50051
    except ValueError:  # its text may hold a password
        host, port, parts = None, 0, urlsplit("")
    given = (option.partition("=") for option in parts.query.split("&"))
    options = {name: unquote(value) for name, _, value in given if name}
    if not host or not set(options) <= _OPTIONS:
        raise ConfigError(
            "this is no URL of a Mooncake Store; give mooncake://MASTER:PORT, and if needed ?segment=SIZE (memory that "
            "this process gives to the store), &protocol=rdma and &device=NAME"
        )
    segment = parse_bytes(options.get("segment", "0"), name="segment")
    return MooncakeURL(f"{host}:{port}", segment, options.get("protocol", "tcp"), options.get("device", ""))


def giving_nothing(url: str) -> str:
    """The same URL for who only looks: memory that such a process gave would take others' values along when it ends."""
    if not url.startswith("mooncake://"):
        return url
    place, _, query = url.partition("?")
    kept = "&".join(option for option in query.split("&") if not option.startswith("segment="))
    return f"{place}?{kept}" if kept else place


class MooncakeValues:
    """Values in a Mooncake Store. Thread-safe."""

    kind = "mooncake"
    capacity_bytes: int | None = None

    def __init__(self, url: str, *, prefix: str, patience: Patience, report: Report) -> None:
        """``report`` is told of every failure. Raises ConfigError if the package is missing or cannot be loaded."""
        self._url = parse_mooncake(url)
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"a Mooncake Store needs its package ({error}); {with_extra('mooncake')}, "
                "and on Debian apt-get install libibverbs1"
            ) from error
        self._make: Callable[[], Any] = MooncakeDistributedStore
        self.place = f"mooncake://{self._url.master}"
        self._prefix, self._patience, self._report = prefix, patience, report
        self._lock = threading.Lock()
        self._store: Any = None
        self._closed = False
        self._breaker = Breaker(self._probe, name="kvboost-mooncake-probe")
        # Asking what is there takes no time, and values do.
        self._asking, self._reading, self._writing = self._guards = [
            Guard(number, name=f"kvboost-mooncake-{name}", patience=patience, breaker=self._breaker)
            for name, number in (("ask", 1), ("read", _READERS), ("write", 1))
        ]

    def open(self) -> None:
        """Set the store up. One that cannot be reached now is used as soon as it can."""
        try:
            self._asking.done(self._set_up, seconds=max(BEHIND_S, self._patience.timeout_s))
        except UnavailableError as error:
            self._report(error)

    @property
    def is_available(self) -> bool:
        """Whether the master and the machines answered when they were last used."""
        return self._store is not None and not self._breaker.is_open

    # Finding

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Which of these are there, by the master."""
        codes = self._ask(self._asking, lambda store: store.batch_is_exist(list(names)))
        return [code == 1 for code in codes] if codes else [False] * len(names)

    def pointers(self, names: Sequence[str]) -> list[list[bytes]]:
        """What was noted under each of these names, newest last."""
        values = self._ask(self._asking, lambda store: store.get_batch(list(names)))
        return [_unpacked(value) for value in values] if values else [[] for _ in names]

    def load(self, names: Sequence[str], *, max_bytes: int) -> Iterator[memoryview | None]:
        """These values in order; several come at the same time."""
        if not self.is_available:
            return iter([None] * len(names))
        works = ((partial(self._fetch, name=name, max_bytes=max_bytes), 0) for name in names)
        deadline = Deadline(self._patience)
        values = self._reading.each(works, ahead=_READERS, deadline=deadline, report=self._report)
        return (next(values, None) for _ in names)

    def _fetch(self, call: Call[memoryview | None], name: str, max_bytes: int) -> memoryview | None:
        """In a thread: a value; None if it is not there."""
        store = self._store
        if not self.is_available:
            raise UnavailableError(None)
        size = _checked(store.get_size(name))
        if size < 0:
            return None
        if size > min(max_bytes, _LARGEST):
            return memoryview(b"")  # none of ours: it will be found damaged
        call.begins(size, self._patience.timeout_s + self._patience.seconds(size))
        buffer = store.get_buffer(name)
        if buffer is None:
            if _checked(store.is_exist(name)) == 1:  # its machine may be gone
                raise RefusedError("a value that is there cannot be read")
            return None
        data = page_aligned(size)
        data[:] = memoryview(buffer).cast("B")[:size]
        return data

    # Keeping

    def put(self, name: str, record: Callable[[], EncodedRecord], *, pointer: tuple[str, bytes]) -> PutOutcome:
        """Write a record unless it is there, and note a pointer to it."""
        there = self._ask(self._asking, lambda store: store.is_exist(name), seconds=BEHIND_S)
        if there is None or there == 1:
            return PutOutcome.REFUSED if there is None else PutOutcome.PRESENT
        encoded = record()
        if encoded.nbytes > _LARGEST:
            too_long = f"a record of more than {_LARGEST:,} bytes; use smaller chunks"
            self._report(UnavailableError(RefusedError(too_long)))
            return PutOutcome.REFUSED
        code = self._ask(
            self._writing,
            lambda store: store.put_parts(name, *encoded.parts),
            seconds=BEHIND_S,
            nbytes=encoded.nbytes,
        )
        if code:
            self._report(UnavailableError(RefusedError(f"put failed with {code}; the store may be full")))
        if code != 0:
            return PutOutcome.REFUSED
        self._ask(self._writing, lambda store: _note(store, *pointer), seconds=BEHIND_S)
        return PutOutcome.STORED

    def touch(self, names: Sequence[str]) -> list[bool]:
        """Nothing, as the master sees what is read. It is not asked what it still has."""
        return [True] * len(names)

    # Forgetting

    def remove(self, names: Sequence[str], *, is_waited_for: bool = False) -> None:
        """Remove these, also while others read them."""
        seconds = self._patience.timeout_s if is_waited_for else BEHIND_S
        self._ask(self._writing, lambda store: store.batch_remove(list(names), True), seconds=seconds)

    def purge(self, owner: str) -> int:
        """Have the master remove all names that begin with an owner, or all. Raises UnavailableError."""
        own = f"^{re.escape(self._prefix)}:2:{owner}.*"
        removed = self._ask(self._writing, lambda store: int(store.remove_by_regex(own, True)), seconds=_ALL_S)
        if removed is None or removed < 0:
            raise UnavailableError(ConnectionError(f"the master did not remove it: {removed}"))
        return removed

    def close(self) -> None:
        """Leave the store, with the memory that was given to it. Does not wait for a master that is gone."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        for guard in self._guards:
            guard.close()

        def leave() -> None:
            for guard in self._guards:
                guard.join()  # a call that is under way would not survive the end of the store
            if store is not None:
                store.close()

        leaving = threading.Thread(target=leave, name="kvboost-mooncake-close", daemon=True)
        leaving.start()
        leaving.join(BEHIND_S)

    # Calls

    def _ask(
        self, guard: Guard, work: Callable[[Any], T], *, seconds: float | None = None, nbytes: int = 0
    ) -> T | None:
        """The answer of a call; None if there was none in time or the store is not in use."""
        store = self._store
        if store is None or self._breaker.is_open:
            return None

        def checked() -> T:
            answer = work(store)
            for code in answer if isinstance(answer, list) else [answer]:
                _checked(code)
            return answer

        try:
            return guard.done(checked, seconds=self._patience.timeout_s if seconds is None else seconds, nbytes=nbytes)
        except UnavailableError as error:
            self._report(error)
            return None

    def _probe(self) -> bool:
        """Set the store up if it is not yet; whether no call hangs and the master answers."""
        if self._store is None:
            self._set_up()
        store = self._store
        if store is None or any(guard.is_stuck for guard in self._guards):
            return False
        return self._asking.done(lambda: int(store.is_exist(f"{self._prefix}:probe")), seconds=BEHIND_S) >= 0

    def _set_up(self) -> None:
        """Raises OSError, and whatever the library raises."""
        url = self._url
        # First whether anybody is there: setup() would look for a minute and a half, and hold all threads of Python up.
        own = own_address(url.master)
        store = self._make()
        code = store.setup(own, "P2PHANDSHAKE", url.segment_bytes, _BUFFER_BYTES, url.protocol, url.device, url.master)
        if code != 0:
            raise ConnectionError(f"the store cannot be set up: error {code}")
        with self._lock:
            if not self._closed and self._store is None:
                self._store = store
                return
        store.close()  # nobody else will


def own_address(master: str) -> str:
    """The address of this machine as the master sees it. Raises OSError if nobody answers there."""
    host, _, port = master.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=BEHIND_S) as probe:
        own: str = probe.getsockname()[0]
        return own


def _checked(code: Any) -> Any:
    """What the library answered. Raises ConnectionError if nobody answered it."""
    if isinstance(code, int) and code == _UNREACHABLE:
        raise ConnectionError("the master does not answer")
    return code


def _note(store: Any, name: str, pointer: bytes) -> int:
    """Add a pointer to those under a name. Of two who do that at once, one is lost: it is only a hint."""
    (value,) = store.get_batch([name])
    kept = [other for other in _unpacked(value) if other != pointer]
    packed = b"".join(len(one).to_bytes(4, "little") + one for one in [*kept, pointer][-MAX_VARIANTS:])
    code: int = store.upsert(name, packed)
    return code


def _unpacked(value: bytes) -> list[bytes]:
    found, at = [], 0
    while at + 4 <= len(value):
        end = at + 4 + int.from_bytes(value[at : at + 4], "little")
        found.append(bytes(value[at + 4 : end]))
        at = end
    return found
