"""Values in a Mooncake Store: the memory that the machines of a fleet give to it, over TCP or RDMA.

Used by the Redis tier for ``mooncake://``: the ledger lies in a Redis, and a record is one value of Mooncake's.
Invariants: no request waits longer than its patience for Mooncake's library, which has no time limits, as its calls run
in a few threads of their own; while those hang, nothing is asked.

Mooncake evicts by itself when it is nearly full: such values are misses, and their entries go. It cannot list its
values, so what a lost ledger knew stays until it does that.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from kvboost.config import parse_bytes
from kvboost.direct_io import page_aligned
from kvboost.errors import ConfigError, with_extra
from kvboost.store.tiers.base import in_order
from kvboost.store.tiers.breaker import Breaker
from kvboost.store.tiers.redis.ledger import Ledger
from kvboost.store.tiers.redis.resp import ServerError
from kvboost.store.tiers.redis.server import Patience, UnavailableError

_PORT = 50051
_THREADS = 4
_BUFFER_BYTES = 128 * 2**20  # what is under way at once, and the largest record
_BEHIND_S = 1.0  # patience with what no request waits for
_ABSENT = -704
_UNREACHABLE = -900
_SIMPLE = ("ledger", "segment", "protocol", "device")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MooncakeURL:
    """``mooncake://MASTER:PORT?ledger=redis://HOST:PORT``."""

    master: str
    ledger: str
    segment_bytes: int
    """Of this process's memory, given to the store; 0 where other processes do that."""
    protocol: str
    device: str
    """Names of RDMA devices; empty for TCP."""


def parse_mooncake(url: str) -> MooncakeURL:
    """What an URL says. Raises ConfigError for one that cannot work."""
    parts = urlsplit(url)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if not parts.hostname or "ledger" not in options or not set(options) <= set(_SIMPLE):
        raise ConfigError(
            "this is no URL of a Mooncake Store; give mooncake://MASTER:PORT?ledger=redis://HOST:PORT, and if needed "
            "&segment=SIZE (memory that this process gives to the store), &protocol=rdma and &device=NAME"
        )
    return MooncakeURL(
        master=f"{parts.hostname}:{parts.port or _PORT}",
        ledger=options["ledger"],
        segment_bytes=parse_bytes(options.get("segment", 0), name="segment"),
        protocol=options.get("protocol", "tcp"),
        device=options.get("device", ""),
    )


@dataclass(slots=True)
class _Fetch:
    """A record under way. Its size is known before its bytes come."""

    name: bytes
    nbytes: int = field(default=0)


class Mooncake:
    """Values in a Mooncake Store. Thread-safe."""

    piece_bytes = _BUFFER_BYTES

    def __init__(self, url: MooncakeURL, *, patience: Patience, report: Callable[[UnavailableError], None]) -> None:
        """``report`` is told of every failure. Raises ConfigError if the package is missing or cannot be loaded.

        A store that cannot be reached now is used as soon as it can.
        """
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"a Mooncake Store needs its package ({error}); {with_extra('mooncake')}, "
                "and on Debian apt-get install libibverbs1"
            ) from error
        self._make: Callable[[], Any] = MooncakeDistributedStore
        self._url, self._patience, self._report = url, patience, report
        self._store: Any = None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvboost-mooncake")
        self._breaker = Breaker(self._probe, name="kvboost-mooncake-probe")
        first = threading.Thread(target=self._begin, name="kvboost-mooncake-setup", daemon=True)
        first.start()
        first.join(max(_BEHIND_S, patience.timeout_s))

    @property
    def is_available(self) -> bool:
        """Whether the master and the machines answered when they were last used."""
        return self._store is not None and not self._breaker.is_open

    def takes(self, name: bytes) -> bool:
        """Whether the store is in use."""
        return self.is_available

    def exist(self, names: Sequence[bytes]) -> list[bool | None]:
        """Which values are there, by the master."""
        codes = self._ask(lambda store: store.batch_is_exist(_texts(names)), self._patience.timeout_s)
        return [None if code < 0 else code == 1 for code in codes] if codes else [None] * len(names)

    def load(self, keys: Sequence[bytes], *, ledger: Ledger, max_bytes: int) -> MooncakeRecords:
        """The records under these keys; several come at the same time."""
        return MooncakeRecords(self, [ledger.value(key) for key in keys], max_bytes=max_bytes)

    def put(self, names: Sequence[bytes], pieces: Sequence[tuple[memoryview, ...]], *, ttl_ms: int) -> bool:
        """Write one record. One that is longer than what can be under way at once is refused."""
        if len(pieces) > 1:
            self._report(UnavailableError(ServerError(f"a record of more than {self.piece_bytes:,} bytes")))
            return False
        parts = pieces[0]
        seconds = _BEHIND_S + sum(map(len, parts)) / self._patience.min_bytes_per_s
        code = self._ask(lambda store: store.put_parts(names[0].decode(), *parts), seconds)
        if code is not None and code != 0:
            self._report(UnavailableError(ServerError(f"put failed with {code}; the store may be full")))
        return code == 0

    def unlink(self, names: Sequence[bytes]) -> list[bytes]:
        """Remove values, also while others read them."""
        codes = self._ask(lambda store: store.batch_remove(_texts(names), True), _BEHIND_S) or [_UNREACHABLE] * len(
            names
        )
        gone = [name for name, code in zip(names, codes, strict=True) if code in (0, _ABSENT)]
        if len(gone) < len(names):
            self._report(UnavailableError(ConnectionError(f"{len(names) - len(gone)} values are removed later")))
        return gone

    def scan(self, prefix: bytes) -> Iterator[list[bytes]]:
        """Nothing: the store does not tell."""
        return iter(())

    def close(self) -> None:
        """Leave the store, with the memory that was given to it. Does not wait for a master that is gone."""
        self._breaker.close()
        store, self._store = self._store, None

        def leave() -> None:
            self._pool.shutdown(cancel_futures=True)  # a call that is under way would not survive the end of the store
            if store is not None:
                store.close()

        leaving = threading.Thread(target=leave, name="kvboost-mooncake-close", daemon=True)
        leaving.start()
        leaving.join(_BEHIND_S)

    # Calls

    def fetch(self, wanted: _Fetch, *, max_bytes: int) -> memoryview | None:
        """In the pool: a record; None if it is not there. Raises OSError."""
        store, name = self._store, wanted.name.decode()
        if store is None or self._breaker.is_open:
            raise ConnectionError("the store is not in use")
        size = store.get_size(name)
        if size < 0:
            _check(size)
            return None
        if size > min(max_bytes, self.piece_bytes):
            return memoryview(b"")  # none of ours: it will be found damaged
        wanted.nbytes = size
        buffer = store.get_buffer(name)
        if buffer is None:
            _check(store.is_exist(name))
            return None
        data = page_aligned(size)
        data[:] = memoryview(buffer).cast("B")[:size]
        return data

    def fetched(self, wanted: _Fetch, coming: Future[memoryview | None]) -> memoryview | UnavailableError | None:
        """What came of a fetch, as long as that may take."""
        try:
            try:
                return coming.result(self._patience.timeout_s)
            except FutureTimeoutError:
                return coming.result(wanted.nbytes / self._patience.min_bytes_per_s)
        except (FutureTimeoutError, OSError) as error:
            return self._failed(error, coming)

    def prefetched(self, names: Sequence[bytes], *, max_bytes: int) -> Any:
        """Each fetch and its future, some begun ahead of the reader."""
        wanted = [_Fetch(name) for name in names]
        return in_order(self._pool, lambda one: self.fetch(one, max_bytes=max_bytes), wanted, ahead=_THREADS)

    def _ask(self, work: Callable[[Any], T], seconds: float) -> T | None:
        """The answer of a call in the pool; None if there was none in time or it could not be reached."""
        store = self._store
        if store is None or self._breaker.is_open:
            return None
        answer = self._pool.submit(work, store)
        try:
            result = answer.result(seconds)
        except FutureTimeoutError as error:
            self._report(self._failed(error, answer))
            return None
        codes = result if isinstance(result, list) else [result]
        if _UNREACHABLE in codes:
            self._report(self._failed(ConnectionError("the master does not answer"), answer))
            return None
        return result

    def _failed(self, error: Exception, call: Future[Any]) -> UnavailableError:
        was_known = self._breaker.is_open
        call.cancel()
        self._breaker.failed()
        return UnavailableError(None if was_known else error)

    def _probe(self) -> bool:
        """Set the store up if it is not yet; whether a thread is free and the master answers."""
        if self._store is None:
            self._set_up()
        well: bool = self._pool.submit(self._store.is_exist, "kvboost:probe").result(_BEHIND_S) >= 0
        return well

    def _begin(self) -> None:
        try:
            self._set_up()
        except OSError as error:
            self._breaker.failed()
            with suppress(Warning):  # a thread of its own: who turns warnings into errors has them counted instead
                self._report(UnavailableError(error))

    def _set_up(self) -> None:
        """Raises OSError."""
        url, store = self._url, self._make()
        own = _own_address(url.master)
        code = store.setup(own, "P2PHANDSHAKE", url.segment_bytes, _BUFFER_BYTES, url.protocol, url.device, url.master)
        if code != 0:
            raise ConnectionError(f"the store cannot be set up: error {code}")
        self._store = store


class MooncakeRecords:
    """Records on their way, in the order asked for."""

    def __init__(self, store: Mooncake, names: Sequence[bytes], *, max_bytes: int) -> None:
        self._store = store
        self._coming = store.prefetched(names, max_bytes=max_bytes) if store.is_available else None
        self._left = len(names)
        self.unavailable: UnavailableError | None = None if store.is_available else UnavailableError(None)

    def __iter__(self) -> MooncakeRecords:
        return self

    def __next__(self) -> memoryview | None:
        if not self._left:
            raise StopIteration
        self._left -= 1
        if self._coming is None:
            return None
        found = self._store.fetched(*next(self._coming))
        if isinstance(found, UnavailableError):
            self.unavailable = found
            self.close()
            return None
        return found

    def close(self) -> None:
        """Give up what has not begun."""
        coming, self._coming = self._coming, None
        if coming is not None:
            with closing(coming):
                return


def _check(code: int) -> None:
    """Raises ConnectionError if a call failed because nobody answered."""
    if code == _UNREACHABLE:
        raise ConnectionError("the master does not answer")


def _texts(names: Sequence[bytes]) -> list[str]:
    return [name.decode() for name in names]


def _own_address(master: str) -> str:
    """The address of this machine as the master sees it."""
    host, _, port = master.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
        return own
