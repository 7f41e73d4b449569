"""What a tenant's session refuses, fetches and forgets."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.core.session import KVBudget, Session, nothing_to_fetch
from kvboost.errors import CapacityError
from tests.core.test_guarded import PlainStore, Store


def session(store: Any, *, exact_limit: int | None = None, **prefiller: Any) -> Session:
    limits: Any = SimpleNamespace(max_positions=None, exact_limit=exact_limit, exact_limit_reason="too long")
    return Session("tenant", store, SimpleNamespace(**prefiller), limits, KVBudget(lambda tokens: tokens))


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
    future: Future[int] = Future()
    store, asked = Store(future), []

    def chunk(*arguments: Any) -> Any:
        asked.append(arguments)
        return SimpleNamespace(lookup="chunks")

    own = session(store, exact_limit=3, chunk=chunk)
    assert own.prefetch([1, 2, 3], [2]) is future
    assert asked == [([1, 2, 3], [2])]
    assert store.calls == [("chunks",)]
    assert own.prefetch([1, 2, 3, 4], []).result(timeout=0) == 0
    assert session(PlainStore()).prefetch([1], []).result(timeout=0) == 0


def test_nothing_to_fetch_is_done() -> None:
    assert nothing_to_fetch().result(timeout=0) == 0


def test_clearing_drops_workspaces_and_what_non_prefix_reuse_knows() -> None:
    cleared: list[str] = []
    pool = SimpleNamespace(clear=lambda: cleared.append("pool"))
    approx = SimpleNamespace(forget=lambda: cleared.append("approx"))
    session(PlainStore(), pool=pool, approx=approx).clear()
    assert sorted(cleared) == ["approx", "pool"]


@pytest.mark.parametrize("approx", [False, True])
def test_a_fetch_runs_in_the_background_as_the_request_is(approx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.core.session.fetch", lambda *arguments, **keywords: (arguments, keywords))
    store = Store("future")
    own = session(store)
    prompt: Any = SimpleNamespace()
    assert own.fetch(prompt, approx=approx) == "future"
    ((work,),) = store.calls
    assert work() == ((own.prefiller, prompt), {"approx": approx})
