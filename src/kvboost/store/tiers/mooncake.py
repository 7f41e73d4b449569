"""Values in a Mooncake Store: the memory that the machines of a fleet give to it, over TCP or RDMA.

Used by the Redis tier for ``mooncake://``: the ledger lies in a Redis, and a record is one value of Mooncake's.
Invariants: no request waits longer than its patience for Mooncake's library, which has no time limits, as its calls run
in a few threads of their own (:mod:`kvboost.store.tiers.calls`); while those hang, nothing is asked; a request that
found them busy is a miss, and no reason to leave the store alone.

Mooncake evicts by itself when it is nearly full: such values are misses, and their entries go. It cannot list its
values, so what a lost ledger knew stays until it does that, or until its tenant is purged.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from kvboost.direct_io import page_aligned
from kvboost.errors import ConfigError, with_extra
from kvboost.store.tiers.breaker import Breaker
from kvboost.store.tiers.calls import Call, Calls, Room
from kvboost.store.tiers.mooncake_url import MooncakeURL, own_address
from kvboost.store.tiers.redis.ledger import Ledger
from kvboost.store.tiers.redis.resp import Deadline, ServerError
from kvboost.store.tiers.redis.server import Patience, UnavailableError

_READERS = 4
_WRITERS = 2
_BUFFER_BYTES = 128 * 2**20  # what is under way at once, and the largest record
_BEHIND_S = 1.0  # patience with what no request waits for
_ALL_S = 30.0  # the master looks at every name
_BEING_WRITTEN = -703
_ABSENT = -704
_UNREACHABLE = -900

T = TypeVar("T")


class Mooncake:
    """Values in a Mooncake Store. Thread-safe."""

    piece_bytes = _BUFFER_BYTES
    max_record_bytes: int | None = _BUFFER_BYTES

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
        self._lock = threading.Lock()
        self._store: Any = None
        self._closed = False
        self._asking = Calls(1, name="kvboost-mooncake-ask")  # apart: it takes no time, and values do
        self._reading = Calls(_READERS, name="kvboost-mooncake-read")
        self._writing = Calls(_WRITERS, name="kvboost-mooncake-write")
        self._room = Room(_BUFFER_BYTES)
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
        if not names:
            return []
        codes = self._ask(
            self._asking, lambda store, _: store.batch_is_exist(_texts(names)), seconds=self._patience.timeout_s
        )
        return [None if code < 0 else code == 1 for code in codes] if codes else [None] * len(names)

    def load(self, keys: Sequence[bytes], *, ledger: Ledger, max_bytes: int) -> MooncakeRecords:
        """The records under these keys; several come at the same time."""
        return MooncakeRecords(self, [ledger.value(key) for key in keys], max_bytes=max_bytes)

    def put(self, names: Sequence[bytes], pieces: Sequence[tuple[memoryview, ...]], *, until_kept_ms: int) -> bool:
        """Write one record."""
        name, (parts,) = names[0].decode(), pieces
        nbytes = sum(map(len, parts))

        def write(store: Any, call: Call[int]) -> int:
            call.pauses()
            with self._room.taken(nbytes):
                if call.is_given_up():
                    return _UNREACHABLE
                call.begins()
                code: int = store.put_parts(name, *parts)
                return code

        def take_back(store: Any, code: int) -> None:
            if code == 0:  # its entry is gone
                store.remove(name, True)

        seconds = _BEHIND_S + nbytes / self._patience.min_bytes_per_s
        code = self._ask(self._writing, write, seconds=seconds, late=take_back)
        if code is not None and code != 0:
            self._report(UnavailableError(ServerError(f"put failed with {code}; the store may be full")))
        return code == 0

    def keep(self, names: Sequence[bytes], *, ttl_ms: int) -> bool:
        """Values do not end by themselves; one that comes too late is taken back."""
        return True

    def unlink(self, names: Sequence[bytes]) -> list[bytes]:
        """Remove values, also while others read them."""
        codes = self._ask(self._writing, lambda store, _: store.batch_remove(_texts(names), True), seconds=_BEHIND_S)
        codes = codes or [_UNREACHABLE] * len(names)
        left = sum(code not in (0, _ABSENT, _BEING_WRITTEN) for code in codes)
        if left:
            self._report(UnavailableError(ConnectionError(f"{left} values are removed later")))
        # One that is being written stays in the ledger's garbage; its writer will find its entry gone, too.
        return [name for name, code in zip(names, codes, strict=True) if code in (0, _ABSENT)]

    def scan(self, prefix: bytes) -> Iterator[list[bytes] | None]:
        """Nothing: the store does not tell."""
        return iter(())

    def forget(self, beginning: bytes) -> None:
        """Have the master remove all values whose names begin with this."""
        pattern = "^" + re.escape(beginning.decode()) + ".*"
        store = self._store
        if store is not None and not hasattr(store, "remove_by_regex"):
            why = "its package is too old to remove that"
        else:
            removed = self._ask(
                self._writing, lambda store, _: int(store.remove_by_regex(pattern, True)), seconds=_ALL_S
            )
            if removed is not None and removed >= 0:
                return
            why = "it did not answer" if removed is None else f"error {removed}"
        self._report(UnavailableError(ServerError(f"what a lost ledger knew may be left there: {why}")))

    def close(self) -> None:
        """Leave the store, with the memory that was given to it. Does not wait for a master that is gone."""
        self._breaker.close()
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        kinds = self._asking, self._reading, self._writing
        for calls in kinds:
            calls.close()

        def leave() -> None:
            for calls in kinds:
                calls.join()  # a call that is under way would not survive the end of the store
            if store is not None:
                store.close()

        leaving = threading.Thread(target=leave, name="kvboost-mooncake-close", daemon=True)
        leaving.start()
        leaving.join(_BEHIND_S)

    # Records

    def deadline(self) -> Deadline:
        """For one lookup."""
        return Deadline(self._patience.timeout_s, min_bytes_per_s=self._patience.min_bytes_per_s)

    def fetch(self, name: bytes, *, max_bytes: int) -> Call[memoryview | None]:
        """Ask for a record."""
        return self._reading.submit(
            lambda call: self._fetch(call, name.decode(), max_bytes), seconds=self._patience.timeout_s
        )

    def _fetch(self, call: Call[memoryview | None], name: str, max_bytes: int) -> memoryview | None:
        """In a thread: a record; None if it is not there. Raises OSError, or ServerError for this one alone."""
        store = self._store
        if store is None or self._breaker.is_open:
            raise ConnectionError("the store is not in use")
        size = store.get_size(name)
        if size < 0:
            _check(size)
            return None
        if size > min(max_bytes, self.piece_bytes):
            return memoryview(b"")  # none of ours: it will be found damaged
        call.pauses()
        with self._room.taken(size):
            if call.is_given_up():
                return None
            call.nbytes = size
            call.begins(self._patience.timeout_s + size / self._patience.min_bytes_per_s)
            buffer = store.get_buffer(name)
            if buffer is None:
                there = store.is_exist(name)
                _check(there)
                if there == 1:  # its machine may be gone, or this process's buffer full of others' values
                    raise ServerError("a value that is there cannot be read")
                return None
            data = page_aligned(size)
            data[:] = memoryview(buffer).cast("B")[:size]
            del buffer  # before others take its room
        return data

    def fetched(self, call: Call[memoryview | None], deadline: Deadline) -> memoryview | UnavailableError | None:
        """What came of a fetch, as long as that may take."""
        begin = time.monotonic()
        in_time = call.wait(deadline.left) or call.wait(call.nbytes / self._patience.min_bytes_per_s)
        if not in_time and call.give_up():
            return self._late()
        deadline.transferred(call.nbytes)
        deadline.waited(time.monotonic() - begin)
        try:
            return call.result()
        except ServerError as error:
            return UnavailableError(error)
        except (OSError, RuntimeError) as error:
            return self._failed(error)

    # Calls

    def _ask(
        self,
        calls: Calls,
        work: Callable[[Any, Call[Any]], T],
        *,
        seconds: float,
        late: Callable[[Any, T], None] | None = None,
    ) -> T | None:
        """The answer of a call; None if there was none in time or it could not be reached.

        ``late`` is told what came after that.
        """
        store = self._store
        if store is None or self._breaker.is_open:
            return None

        def take_late(result: T) -> None:
            if late is not None:
                late(store, result)

        answer = calls.submit(lambda call: work(store, call), seconds=seconds, late=take_late)
        if not answer.wait(seconds) and answer.give_up():
            self._report(self._late())
            return None
        try:
            result: T = answer.result()
        except (OSError, RuntimeError) as error:
            self._report(self._failed(error))
            return None
        if _UNREACHABLE in (result if isinstance(result, list) else [result]):
            self._report(self._failed(ConnectionError("the master does not answer")))
            return None
        return result

    @property
    def _is_stuck(self) -> bool:
        return any(calls.is_stuck for calls in (self._asking, self._reading, self._writing))

    def _late(self) -> UnavailableError:
        """Something did not come in time: the store hangs, or our threads are busy, which is not the store's fault."""
        return self._failed(TimeoutError("the store does not answer")) if self._is_stuck else UnavailableError(None)

    def _failed(self, error: Exception) -> UnavailableError:
        was_known = self._breaker.is_open
        self._breaker.failed()
        return UnavailableError(None if was_known else error)

    def _probe(self) -> bool:
        """Set the store up if it is not yet; whether no call hangs and the master answers."""
        if self._store is None:
            self._set_up()
        store = self._store
        if store is None or self._is_stuck:
            return False
        answer = self._asking.submit(lambda _: int(store.is_exist("kvboost:probe")), seconds=_BEHIND_S)
        if not answer.wait(_BEHIND_S) and answer.give_up():
            return False
        return answer.result() >= 0

    def _begin(self) -> None:
        try:
            self._set_up()
        except Exception as error:  # noqa: BLE001 - whatever its library raises, it is tried again
            self._breaker.failed()
            with suppress(Warning):  # a thread of its own: who turns warnings into errors has them counted instead
                self._report(UnavailableError(error))

    def _set_up(self) -> None:
        """Raises OSError, and whatever the library raises."""
        url = self._url
        # First whether anybody is there: setup() would look for a minute and a half, and hold all threads of Python up.
        own = own_address(url.master, timeout_s=_BEHIND_S)
        store = self._make()
        code = store.setup(own, "P2PHANDSHAKE", url.segment_bytes, _BUFFER_BYTES, url.protocol, url.device, url.master)
        if code != 0:
            raise ConnectionError(f"the store cannot be set up: error {code}")
        with self._lock:
            if not self._closed:
                self._store = store
                return
        store.close()  # nobody else will


class MooncakeRecords:
    """Records on their way, in the order asked for."""

    def __init__(self, store: Mooncake, names: Sequence[bytes], *, max_bytes: int) -> None:
        self._store, self._max_bytes = store, max_bytes
        self._deadline = store.deadline()
        self._left = len(names)
        self._names = iter(names)
        self._coming: deque[Call[memoryview | None]] = deque()
        self.unavailable: UnavailableError | None = None if store.is_available else UnavailableError(None)
        self._is_over = self.unavailable is not None
        for _ in range(0 if self._is_over else _READERS):
            self._ask_for_next()

    def _ask_for_next(self) -> None:
        for name in self._names:
            self._coming.append(self._store.fetch(name, max_bytes=self._max_bytes))
            return

    def __iter__(self) -> MooncakeRecords:
        return self

    def __next__(self) -> memoryview | None:
        if not self._left:
            raise StopIteration
        self._left -= 1
        if self._is_over:
            return None
        coming = self._coming.popleft()
        self._ask_for_next()
        found = self._store.fetched(coming, self._deadline)
        if not isinstance(found, UnavailableError):
            self.unavailable = None
            return found
        self.unavailable = found
        if not isinstance(found.cause, ServerError):  # the next ones would fare no better
            self.close()
        return None

    def close(self) -> None:
        """Give up what has not begun."""
        self._is_over = True
        while self._coming:
            self._coming.popleft().give_up()


def _check(code: int) -> None:
    """Raises ConnectionError if a call failed because nobody answered."""
    if code == _UNREACHABLE:
        raise ConnectionError("the master does not answer")


def _texts(names: Sequence[bytes]) -> list[str]:
    return [name.decode() for name in names]
