"""What the scheduler's side finds, claims and keeps, without vLLM: it needs two base classes of it."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvboost.core.chunking import make_chunker
from kvboost.integrations.vllm.identity import RequestKeys
from kvboost.types import Chunk

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_SIDES = tuple(f"kvboost.integrations.vllm.{name}" for name in ("messages", "scheduler", "worker"))
_PAGE = 16


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of both sides, over empty base classes where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        parts = _BASE.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        for name in ("KVConnectorMetadata", "KVConnectorWorkerMetadata"):
            setattr(sys.modules[_BASE], name, type(name, (), {}))
    for name in _SIDES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in _SIDES})
    for name in _SIDES:
        sys.modules.pop(name, None)


def _setup(*, store: Any = None, mode: str = "exact") -> Any:
    chunker = make_chunker("natural", size=_PAGE, breaks=None)
    fields = dict.fromkeys(("weights", "config", "rope", "dtype", "attention", "numerics"), "x")
    keys = RequestKeys(fields, chunker=chunker, tenant="t", codec="c")
    return SimpleNamespace(
        settings=SimpleNamespace(mode=mode, engine=SimpleNamespace(chunk_tokens=_PAGE)),
        keys=keys,
        block_size=_PAGE,
        has_tiers=store is not None,
        has_events=False,
        may_wait=False,
        open=lambda *, memory: store,
    )


def _request(tokens: list[int], name: str = "r", **wishes: Any) -> Any:
    return SimpleNamespace(
        request_id=name,
        all_token_ids=tokens,
        prompt_token_ids=tokens,
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        prompt_embeds=None,
        mm_features=[],
        pooling_params=None,
        kv_transfer_params=wishes or None,
        cache_salt=None,
        lora_request=None,
        skip_reading_prefix_cache=False,
        block_hashes=[],
        update_block_hashes=lambda: None,
    )


def _step(request: Any, *, computed: int = 0, pages: list[int] | None = None, fresh: bool = True) -> Any:
    """A step in which one request is computed to its end; with no ``pages`` it goes on."""
    count = {request.request_id: len(request.all_token_ids) - computed}
    new = [SimpleNamespace(req_id=request.request_id, block_ids=(pages,), num_computed_tokens=computed)]
    again = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    if not fresh:
        again = SimpleNamespace(
            req_ids=[request.request_id], new_block_ids=[None], num_computed_tokens=[computed], resumed_req_ids=set()
        )
    return SimpleNamespace(
        scheduled_new_reqs=new if fresh else [],
        scheduled_cached_reqs=again,
        num_scheduled_tokens=count,
        total_num_scheduled_tokens=sum(count.values()),
    )


def _read(side: Any, sides: Any, request: Any) -> list[Chunk]:
    """A request is computed and all of it is stored: its chunks."""
    side.arrived(request)
    assert side.matched(request, 0) == 0
    side.allocated(request, [], 0)
    pages = list(range(-(-len(request.all_token_ids) // _PAGE)))
    (save,) = side.orders(_step(request, pages=pages)).saves
    side.learn(sides.messages.Report(stored=[(chunk.prefix_key, chunk.content_key) for chunk in save.chunks]))
    side.finished(request)
    return list(save.chunks)


_TOKENS = [100 + (7 * i) % 1000 for i in range(10 * _PAGE + 1)]


def test_who_queues_longer_than_our_patience_still_gets_what_is_stored(
    sides: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = sides.scheduler.SchedulerSide(_setup())
    _read(side, sides, _request(_TOKENS))
    monkeypatch.setattr(sides.scheduler, "_PATIENCE_S", 0.05)
    late = _request(_TOKENS, "late")
    side.arrived(late)
    time.sleep(0.1)
    assert side.matched(late, 0) is None, "it is fetched"
    (fetch,) = side.orders(_step(_request([], "nobody"), fresh=False)).fetches
    side.learn(sides.messages.Report(held={fetch.number: len(fetch.chunks)}))
    assert side.matched(late, 0) == 10 * _PAGE
    side.finished(late)
    slow = _request(_TOKENS, "slow")
    side.arrived(slow)
    assert side.matched(slow, 0) is None
    time.sleep(0.1)
    assert side.matched(slow, 0) == 0, "nobody waits longer for a fetch"


def test_what_the_store_did_not_take_is_offered_once_more_from_the_beginning(sides: Any) -> None:
    side = sides.scheduler.SchedulerSide(_setup())
    stored = _read(side, sides, _request(_TOKENS))
    longer = _request([*_TOKENS, *range(2000, 2000 + 4 * _PAGE)])
    side.arrived(longer)
    side.matched(longer, 10 * _PAGE)  # vLLM has the rest by itself
    side.allocated(longer, [], 0)
    pages = list(range(15))
    (save,) = side.orders(_step(longer, computed=10 * _PAGE, pages=pages)).saves
    assert save.chunks[0].start > stored[0].end, "the beginning is thought to be stored"
    report = sides.messages.Report
    side.learn(report(refused={"r"}))
    longer.all_token_ids = [*longer.all_token_ids, 5]
    (again,) = side.orders(_step(longer, computed=len(longer.all_token_ids) - 1, fresh=False)).saves
    assert again.chunks[0].start == 0
    assert again.pages == pages[: len(again.pages)]
    side.learn(report(refused={"r"}))
    assert not side.orders(_step(longer, computed=len(longer.all_token_ids) - 1, fresh=False)).saves, "not for ever"


def test_moved_text_is_claimed_where_vllm_has_a_page_more_than_we_hold(sides: Any) -> None:
    side = sides.scheduler.SchedulerSide(_setup(mode="approximate"))
    stored = _read(side, sides, _request(_TOKENS))
    asked = _request([*_TOKENS[: 2 * _PAGE + 3], *_TOKENS[4 * _PAGE :]], "other")
    side.arrived(asked)
    assert side.matched(asked, 2 * _PAGE) is None
    (fetch,) = side.orders(_step(_request([], "nobody"), fresh=False)).fetches
    exact = next(i for i, (one, other) in enumerate(zip(fetch.chunks, stored, strict=False)) if one != other)
    assert fetch.chunks[exact - 1].end < 2 * _PAGE, "we hold less than vLLM has"
    moved = list(range(exact + 1, len(fetch.chunks)))
    side.learn(sides.messages.Report(held={fetch.number: exact}, moved={fetch.number: moved}))
    claimed = side.matched(asked, 2 * _PAGE)
    assert claimed == (fetch.chunks[-1].end // _PAGE - 2) * _PAGE


def test_an_unknown_mode_is_off(sides: Any, caplog: pytest.LogCaptureFixture) -> None:
    side = sides.scheduler.SchedulerSide(_setup())
    request = _request(_TOKENS, kvboost="Off")
    side.arrived(request)
    assert "'Off' is not a mode" in caplog.text
    assert not side.orders(_step(request, pages=list(range(11)))).saves


class _Tier:
    """A store to look into: it has nothing, or it fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, 0

    def leading_run(self, chunks: Any) -> int:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return 0

    def close(self) -> None: ...


def _settled(side: Any, request: Any) -> int:
    end = time.monotonic() + 10
    while (found := side.matched(request, 0)) is None and time.monotonic() < end:
        time.sleep(0.01)
    assert found is not None
    return int(found)


@pytest.mark.parametrize("lasting", [True, False])
def test_after_a_reset_nothing_is_written_under_a_name_that_nobody_finds(sides: Any, lasting: bool) -> None:
    side = sides.scheduler.SchedulerSide(_setup(store=_Tier() if lasting else None))
    before = _request(_TOKENS)
    side.arrived(before)
    assert _settled(side, before) == 0
    assert side.orders(_step(before, pages=list(range(11)))).saves
    side.reset()
    after = _request(_TOKENS, "after")
    side.arrived(after)
    assert _settled(side, after) == 0
    assert bool(side.orders(_step(after, pages=list(range(11)))).saves) is not lasting
    side.close()


def test_a_lookup_that_fails_is_a_miss(sides: Any, caplog: pytest.LogCaptureFixture) -> None:
    side = sides.scheduler.SchedulerSide(_setup(store=_Tier(OSError("gone"))))
    request = _request(_TOKENS)
    side.arrived(request)
    assert _settled(side, request) == 0
    side.close()


def test_a_fetch_that_nobody_wants_any_more_is_not_begun(sides: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides.worker, "_FETCHERS", 1)
    go, asked = threading.Event(), []

    def lease(chunks: Any) -> Any:
        asked.append(chunks)
        go.wait(10)
        raise OSError("nothing here")

    store = SimpleNamespace(lease=lease, close=lambda: None)
    side = sides.worker.WorkerSide(_setup(store=store))
    messages = sides.messages
    chunk: Any = object()
    side.begin(messages.Orders(fetches=[messages.Fetch(number, [chunk]) for number in range(3)]))
    side.begin(messages.Orders(releases=[1]))
    go.set()
    held: set[int] = set()
    while 2 not in held:
        held |= set((side.report() or messages.Report()).held)
        time.sleep(0.01)
    side.close()
    assert (held, len(asked)) == ({0, 2}, 2)
