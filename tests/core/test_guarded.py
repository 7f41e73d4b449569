"""A store without memory, or without a head, never fails a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost.core.guarded import EmptyLease, GuardedStore, JoinedLease, ReleasedLease, joined_loads, loads_of
from kvboost.extend import LayeredStore
from kvboost.store import MemoryStore
from kvboost.types import NOTHING_LOADED, DeclinedLoad, KVBlock, LoadReport, PutOutcome, Where
from tests.contracts.blocks import block_of
from tests.contracts.content import prompt

_CHUNKS = prompt("a", "b", "c")
_LOADED = LoadReport({b"key": "disk"})


class Store:
    """Has slower tiers, notes its calls, and answers each with ``answer`` or raises it."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def _call(self, *arguments: Any, **keywords: Any) -> Any:
        self.calls.append((*arguments, keywords) if keywords else arguments)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    lease = lease_content = put = used = clear = stats = close = fetch = fetch_content = _call
    in_background = leading_run = contains_content = flush = contains = _call


class PlainStore:
    """The least that a store must have."""

    def __init__(self, blocks: Sequence[Any] = ()) -> None:
        self._blocks = blocks
        self.calls: list[tuple[Any, ...]] = []

    def lease(self, chunks: Any) -> Any:
        self.calls.append((chunks,))
        return EmptyLease()

    def lease_content(self, chunks: Any, *, after: int) -> Any:
        self.calls.append((chunks, after))

        class Found(EmptyLease):
            blocks = self._blocks

        return Found()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_no_memory_for_a_copy_is_a_refusal_that_is_logged_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    store = GuardedStore(MemoryStore(10**6))

    def make() -> KVBlock:
        raise error

    assert [store.keep(make) for _ in range(3)] == [PutOutcome.REFUSED] * 3
    assert store.errors == 3
    assert len(caplog.records) == 1
    assert "cache_bytes" in caplog.text
    assert store.keep(lambda: block_of(prompt("a")[0])) is PutOutcome.STORED


def test_a_mistake_of_ours_is_not_taken_for_a_lack_of_memory() -> None:
    def make() -> KVBlock:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        GuardedStore(MemoryStore(10**6)).keep(make)


_ASKED: dict[str, tuple[Callable[[GuardedStore], Any], Any]] = {
    "lease": (lambda store: store.lease(_CHUNKS).blocks, []),
    "lease_content": (lambda store: store.lease_content(_CHUNKS, after=0).blocks, []),
    "leading_run": (lambda store: store.leading_run(_CHUNKS), 0),
    "fetch": (lambda store: store.fetch(_CHUNKS), (NOTHING_LOADED, 0)),
    "fetch_content": (lambda store: store.fetch_content(_CHUNKS, after=0), NOTHING_LOADED),
    "first_stored": (lambda store: store.first_stored(_CHUNKS), None),
    "contains_content": (lambda store: store.contains_content(_CHUNKS), [False] * 3),
    "put": (lambda store: store.put(block_of(_CHUNKS[0])), PutOutcome.REFUSED),
    "used": (lambda store: store.used([b"key"]), None),
}


@pytest.mark.parametrize("method", _ASKED)
def test_a_store_that_fails_is_empty_and_says_so_once(method: str) -> None:
    ask, nothing = _ASKED[method]
    store = GuardedStore(Store(OSError("it is gone")))
    with pytest.warns(RuntimeWarning, match=r"store: it failed .*it is gone.*store_errors") as caught:
        assert ask(store) == nothing
    assert ask(store) == nothing
    assert store.errors == 2
    assert len(caught) == 1


def test_a_store_with_tiers_is_given_everything_and_its_answers_are_returned() -> None:
    inner = Store("abc")  # one for each chunk
    assert isinstance(inner, LayeredStore)
    store, arrived = GuardedStore(inner), print
    assert store.lease(_CHUNKS, arrived=arrived, fetched=_LOADED) == "abc"
    assert store.lease_content(_CHUNKS, after=2, fetched=_LOADED) == "abc"
    assert store.fetch(_CHUNKS) == "abc"
    assert store.fetch_content(_CHUNKS, after=1) == "abc"
    assert store.contains_content(_CHUNKS) == "abc"
    assert store.put(block_of(_CHUNKS[0])) == "abc"
    store.used([b"key"])
    assert inner.calls[:5] == [
        (_CHUNKS, {"arrived": arrived, "fetched": _LOADED}),
        (_CHUNKS, {"after": 2, "fetched": _LOADED}),
        (_CHUNKS,),
        (_CHUNKS, {"after": 1}),
        (_CHUNKS,),
    ]
    assert inner.calls[5][0].key == _CHUNKS[0].prefix_key
    assert inner.calls[6:] == [([b"key"],)]
    assert store.errors == 0


def test_a_store_without_tiers_is_asked_for_what_it_has() -> None:
    inner = PlainStore()
    store: Any = GuardedStore(inner)
    assert store.lease(_CHUNKS, arrived=print, fetched=_LOADED).blocks == []
    assert store.lease_content(_CHUNKS, after=2, fetched=_LOADED).blocks == ()
    assert inner.calls == [(_CHUNKS,), (_CHUNKS, 2)]
    assert store.leading_run(_CHUNKS) == 3, "it cannot tell"
    assert store.fetch(_CHUNKS) == (NOTHING_LOADED, 0)
    assert store.fetch_content(_CHUNKS, after=0) == NOTHING_LOADED
    assert store.first_stored(_CHUNKS) is None
    with store.uncounted():
        pass
    assert store.errors == 0


def test_a_store_without_tiers_is_asked_for_content_by_a_lease() -> None:
    inner = PlainStore([None, block_of(_CHUNKS[1])])
    assert GuardedStore(inner).contains_content(_CHUNKS) == [False, True, False]
    assert inner.calls == [(_CHUNKS, 0)]


def test_what_is_not_counted_is_left_to_the_store() -> None:
    @contextmanager
    def uncounted() -> Any:
        yield "not counted"

    with GuardedStore(SimpleNamespace(uncounted=uncounted)).uncounted() as inside:
        assert inside == "not counted"


@pytest.mark.parametrize("where", ["memory", "near", "anywhere"])
def test_the_first_chunk_that_is_stored_is_found(where: Where) -> None:
    inner = Store([False, True, True])
    assert GuardedStore(inner).first_stored(_CHUNKS, where=where) == _CHUNKS[1]
    keys = [chunk.prefix_key for chunk in _CHUNKS]
    assert inner.calls == [(keys, {"where": where, "tenant": _CHUNKS[0].tenant})]
    assert GuardedStore(Store([False] * 3)).first_stored(_CHUNKS) is None


def test_a_store_that_answers_for_fewer_chunks_has_failed() -> None:
    store = GuardedStore(Store([False]))
    with pytest.warns(RuntimeWarning, match="store: it failed"):
        assert store.first_stored(_CHUNKS) is None
    assert store.contains_content(_CHUNKS) == [False] * 3
    assert store.errors == 2


def test_two_leases_are_one() -> None:
    released: list[str] = []

    def lease(name: str, loads: Any) -> Any:
        return SimpleNamespace(blocks=[name], loads=loads, release=lambda: released.append(name))

    declined = DeclinedLoad("redis", 16, 2.0, 1.0)
    one, other = LoadReport({b"1": "disk"}, (), {0: 16}), LoadReport({b"2": "redis"}, (declined,), {16: 8})
    both = JoinedLease(lease("first", one), lease("second", other))
    assert both.blocks == ["first", "second"]
    assert both.loads == joined_loads(one, other)
    assert both.loads == LoadReport({b"1": "disk", b"2": "redis"}, (declined,), {0: 16, 16: 8})
    assert joined_loads(other, one).declined == (declined,)
    both.release()
    assert released == ["first", "second"]


def test_a_lease_reports_its_loads_if_it_has_any() -> None:
    assert loads_of(ReleasedLease(_LOADED)) is _LOADED
    assert loads_of(EmptyLease()) is NOTHING_LOADED
    assert loads_of(SimpleNamespace(loads=7)) is NOTHING_LOADED
