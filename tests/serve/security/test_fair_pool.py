from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import Future

import pytest

from kvboost.serve.errors import ApiError
from kvboost.serve.security.fair_pool import FairPool


class _Work:
    """Work that is done when it is let, and notes its order."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.done: list[str] = []

    def first(self) -> None:
        self.begun.set()
        self.go.wait(10)

    def note(self, name: str) -> str:
        self.done.append(name)
        return name


async def _blocked(pool: FairPool, work: _Work) -> asyncio.Task[None]:
    """A pool whose one thread is busy."""
    first = asyncio.create_task(pool.run("a", work.first))
    await asyncio.to_thread(work.begun.wait, 10)
    return first


async def _ended(name: str) -> None:
    """Wait for the end of a pool's thread."""
    end = time.monotonic() + 20
    while any(thread.name == name for thread in threading.enumerate()):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def _tasks(pool: FairPool, work: _Work, names: str) -> list[asyncio.Task[str]]:
    return [asyncio.create_task(pool.run(name[0], work.note, name)) for name in names.split()]


def test_one_tenants_many_prompts_do_not_come_before_anothers_one() -> None:
    async def scenario() -> list[str]:
        pool, work = FairPool(max_waiting=10, name="test"), _Work()
        first = await _blocked(pool, work)
        tasks = _tasks(pool, work, "a1 a2 a3 b1 c1 b2")
        await asyncio.sleep(0)
        work.go.set()
        assert await asyncio.gather(first, *tasks) == [None, "a1", "a2", "a3", "b1", "c1", "b2"]
        pool.close()
        return work.done

    assert asyncio.run(scenario()) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_what_waits_is_bounded_and_has_room_for_another_tenant() -> None:
    async def scenario() -> None:
        pool, work = FairPool(max_waiting=3, name="test"), _Work()
        first = await _blocked(pool, work)
        tasks = _tasks(pool, work, "a1 a2 a3")
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="3 requests wait") as refused:
            await pool.run("a", work.note, "a4")
        assert refused.value.status == 429
        tasks += _tasks(pool, work, "b1")
        await asyncio.sleep(0)
        work.go.set()
        await asyncio.gather(first, *tasks)
        pool.close()
        assert sorted(work.done) == ["a1", "a2", "a3", "b1"]

    asyncio.run(scenario())


def test_what_nobody_waits_for_is_not_begun() -> None:
    async def scenario() -> list[str]:
        pool, work = FairPool(max_waiting=10, name="test"), _Work()
        first = await _blocked(pool, work)
        gone, stays = _tasks(pool, work, "a1 a2")
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        work.go.set()
        await asyncio.gather(first, stays)
        pool.close()
        return work.done

    assert asyncio.run(scenario()) == ["a2"]


def test_what_nobody_waits_for_takes_no_place_in_the_queue() -> None:
    async def scenario() -> None:
        pool, work = FairPool(max_waiting=1, name="test"), _Work()
        first = await _blocked(pool, work)
        (gone,) = _tasks(pool, work, "a1")
        await asyncio.sleep(0)
        assert pool.waiting == 1
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert pool.waiting == 0
        (taken,) = _tasks(pool, work, "a2")
        await asyncio.sleep(0)
        work.go.set()
        assert await asyncio.gather(first, taken) == [None, "a2"]
        pool.close()

    asyncio.run(scenario())


def test_the_end_of_an_answer_is_never_refused() -> None:
    async def scenario() -> None:
        pool, work = FairPool(max_waiting=1, name="test"), _Work()
        first = await _blocked(pool, work)
        tasks = _tasks(pool, work, "a1")
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(pool.finish("a", work.note, "a2")))
        await asyncio.sleep(0)
        work.go.set()
        assert await asyncio.gather(first, *tasks) == [None, "a1", "a2"]
        pool.close()

    asyncio.run(scenario())


def test_the_end_of_an_answer_is_done_also_if_its_client_has_gone() -> None:
    async def scenario() -> list[str]:
        pool, work = FairPool(max_waiting=10, name="test"), _Work()
        first = await _blocked(pool, work)
        gone = asyncio.create_task(pool.finish("a", work.note, "a1"))
        await asyncio.sleep(0)
        gone.cancel()
        assert isinstance((await asyncio.gather(gone, return_exceptions=True))[0], asyncio.CancelledError)
        work.go.set()
        await asyncio.gather(first, *_tasks(pool, work, "a2"))
        pool.close()
        return work.done

    assert asyncio.run(scenario()) == ["a1", "a2"]


def test_a_prompt_that_was_cancelled_as_its_turn_came_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    class Prompt:
        pass

    async def scenario() -> None:
        pool, prompt = FairPool(max_waiting=10, name="test"), Prompt()
        held = weakref.ref(prompt)
        monkeypatch.setattr(Future, "set_running_or_notify_cancel", lambda future: False)
        gone = asyncio.create_task(pool.run("a", lambda prompt: None, prompt))
        await asyncio.sleep(0)
        while pool.waiting:
            await asyncio.sleep(0.001)
        del prompt
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        del gone
        for _ in range(50):
            await asyncio.sleep(0.01)
            gc.collect()  # what was cancelled holds itself
            if held() is None:
                break
        assert held() is None
        pool.close()

    asyncio.run(scenario())


def test_an_error_is_raised_where_the_result_is_waited_for() -> None:
    async def scenario() -> None:
        pool = FairPool(max_waiting=10, name="test")
        with pytest.raises(ZeroDivisionError):
            await pool.run("a", lambda: 1 // 0)
        assert await pool.run("a", lambda: 2) == 2, "the thread goes on"
        pool.close()

    asyncio.run(scenario())


def test_a_pool_with_nothing_to_do_can_be_closed() -> None:
    async def scenario() -> None:
        pool = FairPool(max_waiting=10, name="closed-idle")
        await pool.run("a", time.sleep, 0)
        pool.close()
        await _ended("closed-idle")

    asyncio.run(scenario())


def test_the_end_of_an_answer_comes_before_its_tenants_other_work() -> None:
    async def scenario() -> list[str]:
        pool, work = FairPool(max_waiting=10, name="test"), _Work()
        first = await _blocked(pool, work)
        tasks = _tasks(pool, work, "a1 a2")
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(pool.finish("a", work.note, name)) for name in ("a3", "a4")]
        await asyncio.sleep(0)
        work.go.set()
        await asyncio.gather(first, *tasks)
        pool.close()
        return work.done

    assert asyncio.run(scenario()) == ["a3", "a4", "a1", "a2"]


def test_a_pool_closed_while_it_works_ends_its_thread() -> None:
    async def scenario() -> None:
        pool, work = FairPool(max_waiting=10, name="closed-at-work"), _Work()
        first = await _blocked(pool, work)
        pool.close()
        work.go.set()
        await first
        await _ended("closed-at-work")

    asyncio.run(scenario())


def test_a_thread_that_cannot_start_costs_one_request_and_not_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        pool, work = FairPool(max_waiting=10, name="no-thread"), _Work()

        def cannot(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", cannot)
            with pytest.raises(ApiError, match="no thread"):
                await pool.run("a", work.note, "a1")
        assert pool.waiting == 0
        assert await asyncio.wait_for(pool.run("a", work.note, "a2"), 20) == "a2"
        assert work.done == ["a2"]
        pool.close()

    asyncio.run(scenario())
