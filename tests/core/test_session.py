"""What a tenant's session refuses, fetches and forgets."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.core.guarded import GuardedStore
from kvboost.core.session import KVBudget, SequenceLimits, Session, fetch, nothing_to_fetch
from kvboost.errors import CapacityError
from kvboost.types import NOTHING_LOADED, Fetched, LoadReport
from tests.core.test_guarded import PlainStore, Store


def session(below: Any, *, exact_limit: int | None = None, **prefiller: Any) -> Session:
    limits = SequenceLimits(exact_limit=exact_limit, exact_limit_reason="too long")
    inner: Any = SimpleNamespace(**{"store": GuardedStore(below), **prefiller})
    return Session("tenant", below, inner, limits, KVBudget(lambda tokens: tokens))


def test_a_budget_counts_the_bytes_of_all_sequences() -> None:
    budget = KVBudget(lambda tokens: 10 * tokens, limit=60)
    assert budget.fits(6)
    assert not budget.fits(7)
    assert budget.fits(3, sequences=2)
    assert not budget.fits(4, sequences=2)
    assert KVBudget(lambda tokens: 10 * tokens).fits(10**9)
    budget.check(3, sequences=2, why="it is not asked")
    with pytest.raises(CapacityError, match="KV of 4 tokens.*kv_bytes=60.*and pages are off"):
        budget.check(4, sequences=2, why="pages are off")


def test_only_a_prompt_above_the_limit_is_refused_reuse() -> None:
    limited = session(Store(None), exact_limit=100)
    assert limited.refusal(100) is None
    assert limited.refusal(101) == "too long"
    assert session(Store(None)).refusal(10**9) is None
    assert limited.fetches(100)
    assert not limited.fetches(101)
    assert not session(PlainStore()).fetches(1), "it has no slower tiers"


def test_a_prefetch_asks_the_store_for_the_chunks_to_look_up() -> None:
    chunks = [SimpleNamespace(prefix_key=key, start=start, end=start + 5) for key, start in ((b"a", 0), (b"b", 5))]

    class Layered(Store):
        def in_background(self, work: Any, *, tenant: str) -> Any:
            self.calls.append((tenant,))
            future: Future[int] = Future()
            future.set_result(work())
            return future

    store, asked = Layered((LoadReport({b"b": "disk"}), 2)), []

    def chunk(*arguments: Any) -> Any:
        asked.append(arguments)
        return SimpleNamespace(lookup=chunks)

    own = session(store, exact_limit=3, chunk=chunk, leading=lambda prompt: prompt.lookup)
    assert own.prefetch([1, 2, 3], [2]).result(timeout=0) == 5
    assert asked == [([1, 2, 3], [2])]
    assert store.calls == [("tenant",), (chunks,)]
    assert own.prefetch([1, 2, 3, 4], []).result(timeout=0) == 0
    assert session(PlainStore()).prefetch([1], []).result(timeout=0) == 0


def test_nothing_to_fetch_is_done() -> None:
    assert nothing_to_fetch().result(timeout=0) == 0


def test_clearing_drops_workspaces() -> None:
    """The engine clears what non-prefix reuse knows: tests/approx/test_find.py, test_trust.py."""
    cleared: list[str] = []
    session(PlainStore(), pool=SimpleNamespace(clear=lambda: cleared.append("pool"))).clear()
    assert cleared == ["pool"]


@pytest.mark.parametrize("approx", [False, True])
def test_a_fetch_runs_in_the_background_as_the_request_is(approx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.core.session.fetch", lambda *arguments, **keywords: (arguments, keywords))
    store = Store("future")
    own = session(store, store=GuardedStore(store))
    prompt: Any = SimpleNamespace()
    assert own.fetch(prompt, approx=approx) == "future"
    ((work, given),) = store.calls
    assert given == {"tenant": own.tenant}
    assert work() == ((own.prefiller, prompt), {"approx": approx})


_EXACT, _CONTENT, _TAIL = (LoadReport({name: "disk"}) for name in (b"exact", b"content", b"tail"))


def fetched(*, known: int, first: int | None, tail: str | None, approx: bool) -> tuple[Fetched, list[Any]]:
    """Of a prompt with four chunks to look up, three of them usable elsewhere; and what was asked for."""
    asked: list[Any] = []

    def bring(chunks: Any) -> tuple[LoadReport, int]:
        asked.append(("exact", chunks))
        return (_TAIL, 1) if chunks == [tail] else (_EXACT, known)

    def bring_content(chunks: Any, *, after: int) -> LoadReport:
        asked.append(("content", chunks, after))
        return _CONTENT

    def first_wanted(chunks: Any, *, available: int) -> int | None:
        asked.append(("wanted", chunks, available))
        return first

    def stored_tail(prompt: Any, found: int) -> str | None:
        asked.append(("tail", prompt, found))
        return tail

    prefiller: Any = SimpleNamespace(
        store=SimpleNamespace(fetch=bring, fetch_content=bring_content),
        approx=SimpleNamespace(first_wanted=first_wanted),
        stored_tail=stored_tail,
        leading=lambda prompt: prompt.lookup,
    )
    prompt: Any = SimpleNamespace(lookup="0123", usable="012")
    found = fetch(prefiller, prompt, approx=approx)
    assert ("tail", prompt, known) in asked
    return found, [entry for entry in asked if entry[0] != "tail"]


def test_leading_chunks_and_the_end_of_an_earlier_prompt_are_brought_up() -> None:
    assert fetched(known=2, first=0, tail=None, approx=False) == (Fetched(_EXACT, NOTHING_LOADED), [("exact", "0123")])
    found, asked = fetched(known=2, first=0, tail="a tail", approx=False)
    assert found.exact.tiers == {b"exact": "disk", b"tail": "disk"}
    assert asked == [("exact", "0123"), ("exact", ["a tail"])]


@pytest.mark.parametrize(("known", "available"), [(1, 1), (4, 3)])
def test_chunks_elsewhere_are_wanted_behind_what_is_there(known: int, available: int) -> None:
    found, asked = fetched(known=known, first=2, tail=None, approx=True)
    assert found == Fetched(_EXACT, _CONTENT)
    assert asked == [("exact", "0123"), ("wanted", "012", available), ("content", "012", 2)]


@pytest.mark.parametrize("first", [None, 3])
def test_nothing_elsewhere_is_brought_up_if_nothing_is_wanted(first: int | None) -> None:
    found, asked = fetched(known=1, first=first, tail=None, approx=True)
    assert found == Fetched(_EXACT, NOTHING_LOADED)
    assert [entry[0] for entry in asked] == ["exact", "wanted"]
