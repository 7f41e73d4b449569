"""Mooncake's library as it hangs, dawdles and fails, played by a stand-in: what that costs, and who is blamed."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import pytest

from kvboost.store import RedisTier
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import EncodedRecord, RecordFormat
from kvboost.store.tiers import mooncake
from kvboost.store.tiers.mooncake import MooncakeValues, own_address
from kvboost.store.tiers.remote import Patience, RefusedError, UnavailableError
from kvboost.types import PutOutcome
from tests.contracts.blocks import SIZE, block_of, namespace
from tests.contracts.content import prompt

RECORDS = RecordFormat(namespace())
URL = "mooncake://127.0.0.1:1"
MAX_BYTES = 10**6


class Library:
    """As ``MooncakeDistributedStore``, as far as it is used."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.unreadable: set[str] = set()
        self.seconds = 0.0
        """Of each transfer."""
        self.held = threading.Event()
        """Cleared: transfers hang."""
        self.held.set()
        self.may_set_up = threading.Event()
        self.may_set_up.set()
        self.setup_error: Exception | None = None
        self.closed = False
        self.segment_bytes = -1
        self.under_way = self.most_under_way = 0
        self._lock = threading.Lock()

    def setup(self, own: str, metadata: str, segment_bytes: int, *_: object) -> int:
        self.segment_bytes = segment_bytes
        self.may_set_up.wait()
        if self.setup_error is not None:
            raise self.setup_error
        return 0

    def close(self) -> None:
        self.closed = True

    def is_exist(self, name: str) -> int:
        return int(name in self.values)

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [self.is_exist(name) for name in names]

    def get_size(self, name: str) -> int:
        return len(self.values[name]) if name in self.values else -704

    def get_buffer(self, name: str) -> bytes | None:
        self._transfer(len(self.values[name]))
        return None if name in self.unreadable else self.values.get(name)

    def put_parts(self, name: str, *parts: memoryview) -> int:
        self._transfer(sum(map(len, parts)))
        self.values[name] = b"".join(parts)
        return 0

    def get_batch(self, names: list[str]) -> list[bytes]:
        return [self.values.get(name, b"") for name in names]

    def upsert(self, name: str, value: bytes) -> int:
        self.values[name] = value
        return 0

    def remove(self, name: str, force: bool) -> int:
        return 0 if self.values.pop(name, None) is not None else -704

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        return [self.remove(name, force) for name in names]

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        names = [name for name in self.values if re.search(pattern, name)]
        return sum(self.remove(name, force) == 0 for name in names)

    def _transfer(self, nbytes: int) -> None:
        with self._lock:
            self.under_way += nbytes
            self.most_under_way = max(self.most_under_way, self.under_way)
        time.sleep(self.seconds)
        self.held.wait()
        with self._lock:
            self.under_way -= nbytes


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    module = ModuleType("mooncake.store")
    module.MooncakeDistributedStore = lambda: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(mooncake, "own_address", lambda master: "127.0.0.1")
    yield made
    made.held.set()
    made.may_set_up.set()


class Opened:
    """The values of a stand-in, and what was reported."""

    def __init__(self, library: Library, *, timeout_s: float, url: str = URL) -> None:
        self.reported: list[UnavailableError] = []
        patience = Patience(timeout_s, min_bytes_per_s=1e9)
        self.values = MooncakeValues(url, prefix="p", patience=patience, report=self.reported.append)
        self.values.open()
        self._library = library

    def names(self, count: int, *, nbytes: int = 100) -> list[str]:
        """Of so many values that are there."""
        names = [f"p:{number}" for number in range(count)]
        self._library.values |= {name: name.encode().ljust(nbytes) for name in names}
        return names

    def load(self, names: list[str]) -> Iterator[memoryview | None]:
        return self.values.load(names, max_bytes=MAX_BYTES)

    def put(self, name: str) -> PutOutcome:
        record = EncodedRecord((memoryview(b"value"),), 5)
        return self.values.put(name, lambda: record, pointer=(f"{name}:content", b"pointer"))

    def close(self) -> None:
        self._library.held.set()
        self.values.close()


def opened(library: Library, *, timeout_s: float, url: str = URL) -> closing[Opened]:
    return closing(Opened(library, timeout_s=timeout_s, url=url))


def open_tier(url: str = URL) -> RedisTier:
    return RedisTier(url, records=RECORDS, timeout_s=10.0)


def until(holds: Callable[[], bool], *, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.005)


def test_values_come_in_order_and_what_is_not_there_is_a_miss(library: Library) -> None:
    with opened(library, timeout_s=10.0) as store:
        names = store.names(9)
        wanted = [*names[:5], "other", *names[5:]]
        found = [None if value is None else bytes(value).decode().strip() for value in store.load(wanted)]
        assert found == [*names[:5], None, *names[5:]]
        assert not store.reported


def test_requests_that_wait_for_each_other_are_not_held_against_the_store(library: Library) -> None:
    with opened(library, timeout_s=0.5) as store:
        names = store.names(4)
        library.seconds = 0.4
        first, second = store.load(names), store.load(names)
        assert list(second) == [None] * 4, "nobody had to wait, so this test tests nothing"
        assert None not in list(first)
        assert store.values.is_available
        assert [error.cause for error in store.reported] == [None], "somebody is blamed"


def test_asking_what_is_there_does_not_wait_for_values(library: Library) -> None:
    with opened(library, timeout_s=10.0) as store:
        names = store.names(8)
        library.held.clear()
        loading = store.load(names)
        until(lambda: library.under_way == 4 * 100)
        begin = time.monotonic()
        assert store.values.exist(names) == [True] * 8
        assert time.monotonic() - begin < 5.0
        library.held.set()
        assert None not in list(loading)


def test_a_value_that_hangs_closes_the_store_until_it_comes(library: Library) -> None:
    with opened(library, timeout_s=0.1) as store:
        names = store.names(3)
        library.held.clear()
        assert list(store.load(names)) == [None] * 3
        list(store.load(names))  # where the first one found it busy, as its call had begun late
        time.sleep(0.3)
        assert not store.values.is_available, "used again while it hangs"
        library.held.set()
        until(lambda: store.values.is_available)
        assert None not in list(store.load(names))


def test_a_value_that_hangs_is_seen_though_nobody_waited_for_it(library: Library) -> None:
    with opened(library, timeout_s=0.1) as store:
        names = store.names(2)
        library.held.clear()
        store.load(names).close()
        until(lambda: library.under_way > 0)
        time.sleep(0.2)
        assert list(store.load(names)) == [None] * 2
        assert not store.values.is_available


def test_one_lookup_has_one_budget(library: Library) -> None:
    with opened(library, timeout_s=0.2) as store:
        names = store.names(400)  # each takes less than the budget: 400 of them, by four threads, take 10 s
        library.seconds = 0.1
        begin = time.monotonic()
        found = list(store.load(names))
        assert time.monotonic() - begin < 3.0, "every record had a budget of its own"
        assert found[0] is not None
        assert found[-1] is None
        assert store.values.is_available


def test_a_value_that_cannot_be_read_is_told_and_costs_no_other(library: Library) -> None:
    with opened(library, timeout_s=10.0) as store:
        names = store.names(3)
        library.unreadable.add(names[1])
        assert [value is not None for value in store.load(names)] == [True, False, True]
        assert [type(error.cause) for error in store.reported] == [RefusedError]
        assert store.values.is_available


def test_what_can_be_under_way_at_once_fits_into_the_buffer(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_LARGEST", 400)
    with opened(library, timeout_s=10.0) as store:
        library.seconds = 0.02
        assert None not in list(store.load(store.names(8, nbytes=400)))
        assert library.most_under_way <= mooncake._BUFFER_BYTES // mooncake._LARGEST * 400
        assert [bytes(value or b"?") for value in store.load(store.names(1, nbytes=401))] == [b"?"], "too large a part"


def test_a_store_set_up_after_it_was_closed_is_left(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "BEHIND_S", 0.05)
    library.may_set_up.clear()
    store = Opened(library, timeout_s=0.05)
    store.close()
    assert not library.closed
    library.may_set_up.set()
    until(lambda: library.closed)


def test_the_library_is_not_set_up_while_nobody_is_there(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold up every thread of the process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"mooncake://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(mooncake, "own_address", own_address)
        with opened(library, timeout_s=1.0, url=url) as store:
            assert [type(error.cause) for error in store.reported] == [ConnectionRefusedError]
            time.sleep(0.3)
            assert library.segment_bytes == -1, "it was set up"
            listener.listen()
            until(lambda: store.values.is_available)


def test_a_library_that_raises_at_the_start_is_tried_again(library: Library) -> None:
    library.setup_error = RuntimeError("no device")
    with opened(library, timeout_s=1.0) as store:
        assert [str(error.cause) for error in store.reported] == ["no device"]
        assert not store.values.is_available
        library.setup_error = None
        until(lambda: store.values.is_available)


def test_values_are_purged_by_the_beginning_of_their_names(library: Library) -> None:
    with opened(library, timeout_s=10.0) as store:
        others = {"q:p:2:ab:1:x", "of another program"}
        library.values = dict.fromkeys(["p:2:ab:1:x", "p:2:ab:2:x", "p:2:cd:1:x", *others], b"")
        assert store.values.purge("ab:2") == 1
        assert store.values.purge("ab") == 1
        assert set(library.values) == {"p:2:cd:1:x", *others}
        assert store.values.purge("") == 1
        assert set(library.values) == others
        assert not store.reported


def test_a_few_pointers_are_noted_under_a_name(library: Library) -> None:
    with opened(library, timeout_s=10.0) as store:
        for number in range(12):
            record = EncodedRecord((memoryview(b"value"),), 5)
            pointer = f"{number}".encode()
            assert (
                store.values.put(f"{number}", lambda record=record: record, pointer=("c", pointer)) is PutOutcome.STORED
            )
        assert store.values.pointers(["c", "absent"]) == [[f"{number}".encode() for number in range(4, 12)], []]
        assert store.put("3") is PutOutcome.PRESENT


def test_a_failure_while_a_tier_is_opened_is_counted(library: Library) -> None:
    library.setup_error = RuntimeError("no device")
    with pytest.warns(RuntimeWarning, match="no device"), closing(open_tier()) as tier:
        assert sum(tier.health().values()) == 1


def test_a_record_that_is_too_long_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    large = block_of(prompt("large")[0], 3 * SIZE)
    monkeypatch.setattr(mooncake, "_LARGEST", RECORDS.size_of(large) - 1)
    with closing(open_tier()) as tier:
        with pytest.warns(RuntimeWarning, match="smaller chunks"):
            assert tier.store(large) is PutOutcome.REFUSED
        assert tier.store(block_of(prompt("a")[0])) is PutOutcome.STORED


def test_memory_is_given_by_who_stores_and_not_by_who_looks(library: Library) -> None:
    url = f"{URL}?segment=16MiB"
    with closing(open_tier(url)):
        assert library.segment_bytes == 2**24
    with closing(open_catalogue(url)):
        assert library.segment_bytes == 0


def test_every_failure_of_a_load_is_counted(library: Library) -> None:
    blocks = [block_of(prompt(f"text {number}")[0]) for number in range(4)]
    with closing(open_tier()) as tier:
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        library.unreadable |= {tier._name(block.key) for block in blocks[:3]}
        with pytest.warns(RuntimeWarning, match="cannot be read"):
            found = list(tier.load([block.key for block in blocks]))
        assert [block is None for block in found] == [True, True, True, False]
        assert sum(tier.health().values()) == 3


_HANGS = """
import sys, threading, types
from kvboost.store.tiers import mooncake
from tests.store.tiers.test_mooncake_calls import Library, Opened
library = Library()
module = types.ModuleType("mooncake.store")
module.MooncakeDistributedStore = lambda: library
sys.modules["mooncake"] = types.ModuleType("mooncake")
sys.modules["mooncake.store"] = module
mooncake.own_address = lambda master: "127.0.0.1"
store = Opened(library, timeout_s=0.1)
names = store.names(4)
library.held.clear()
print(list(store.load(names)), flush=True)
"""


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    command = [sys.executable, "-c", textwrap.dedent(_HANGS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([None] * 4)


def test_a_stand_in_has_what_the_library_has() -> None:
    library: Any = pytest.importorskip("mooncake.store").MooncakeDistributedStore
    used = [name for name in vars(Library) if not name.startswith("_")]
    assert [name for name in used if not hasattr(library, name)] == []
