"""A step that hangs is noticed, and nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvboost import ConfigError, KVBoost
from kvboost.errors import ClosedError
from kvboost.scheduler.jobs import Finished, Job
from kvboost.scheduler.runner import BatchRunner, StepWatch


def _until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def test_nobody_waits_for_a_step_that_hangs(tiny: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    hangs, go_on = threading.Event(), threading.Event()

    def hang(tokens: list[int], logits: Any) -> None:
        hangs.set()
        assert go_on.wait(60)

    engine = KVBoost(tiny("llama"), None, chunk_size=8, chunking="fixed")
    runner = BatchRunner(engine, max_running=1, max_step_seconds=1.0)
    jobs = (Job(token_ids=(5, 6), max_new_tokens=2, constrain=hang), Job(token_ids=(7,), max_new_tokens=2))
    tickets = [runner.submit(job) for job in jobs]
    assert hangs.wait(30)
    assert runner.load().alive
    for ticket in tickets:
        (last,) = ticket.events()
        assert isinstance(last, Finished)
        assert (last.reason, last.error) == ("error", runner.load().failure)
    load = runner.load()
    assert load.failure == "a step took more than 1 s, so the runner accepts no more jobs"
    assert not load.alive
    assert load.step_seconds >= 1.0
    assert "scheduler/test_watch.py" in caplog.text, "where it hangs"
    with pytest.raises(ClosedError, match="a step took more than 1 s"):
        runner.submit(jobs[1])
    began = time.monotonic()
    runner.close()
    assert time.monotonic() - began < 20
    assert runner.load().cached_bytes > 0, "the step still uses it"
    go_on.set()
    assert _until(lambda: not runner._thread.is_alive())
    load = runner.load()
    assert (load.running, load.waiting, load.cached_bytes, load.step_seconds) == (0, 0, 0, 0.0)
    assert load.failure is not None, "its clients have gone"


def test_what_runs_is_timed_and_waiting_is_not(tiny: Callable[..., Any]) -> None:
    seen: list[float] = []
    with BatchRunner(KVBoost(tiny("llama"), None)) as runner:
        watch = {"constrain": lambda tokens, logits: seen.append(runner.load().step_seconds)}
        list(runner.submit(Job(token_ids=(5, 6), max_new_tokens=4, **watch)).events())
        assert min(seen) > 0
        assert _until(lambda: runner.load().step_seconds == 0.0), "an idle runner does not hang"


def test_each_step_has_the_whole_time() -> None:
    told: list[str] = []
    watch = StepWatch(threading.current_thread(), max_seconds=1.0, hung=told.append)
    for _ in range(30):
        watch.begin()
        time.sleep(0.05)
    watch.end()
    time.sleep(1.5)
    assert told == []
    watch.begin()
    assert _until(lambda: bool(told))
    time.sleep(1.5)
    assert told == ["a step took more than 1 s, so the runner accepts no more jobs"], "once"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_no_limit_that_cannot_work(seconds: float, tiny: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="max_step_seconds"):
        BatchRunner(KVBoost(tiny("llama"), None), max_step_seconds=seconds)
