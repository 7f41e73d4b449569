"""How much of a prompt the runner computes in one step: what the device holds, or what others can wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.scheduler.forwards import Forwards
from kvboost.scheduler.jobs import Ticket
from kvboost.scheduler.loop import JobLoop, LoopRules
from kvboost.scheduler.queue import Limits
from kvboost.scheduler.runner import BatchRunner
from kvboost.scheduler.sequence import RunningJob
from tests.helpers.devices import Devices, put
from tests.helpers.models import tiny_model
from tests.scheduler.test_runner import Watched, engine_of, ids, job, run

_TEXT = [3 + i * i % 89 for i in range(8192)]


def reads(watched: Watched) -> list[int]:
    return [rows for what, rows in watched.did if what == "read"]


def long_engine(tiny: Callable[..., Any]) -> KVBoost:
    return engine_of(tiny("llama", num_hidden_layers=1, max_position_embeddings=9000))


@pytest.mark.parametrize(("speed", "expected"), [(None, [256] * 7 + [208]), (10**6, [2000]), (900, [900, 900, 200])])
def test_alone_a_step_takes_a_second_at_most(
    speed: int | None, expected: list[int], tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = long_engine(tiny)
    if speed is not None:  # else it is not known how long a step takes
        for _ in range(2):  # the first may be slow for reasons of its own
            engine.session.prefiller.costs.observe_prefill(forwards=1, tokens=speed, seconds=1.0)  # type: ignore[union-attr]
    with BatchRunner(engine) as runner:
        watched = Watched(engine, monkeypatch)
        run(runner, [job(_TEXT[:2000], 1)])
    assert reads(watched) == expected


def test_a_step_shrinks_when_somebody_decodes(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = long_engine(tiny)
    engine.session.prefiller.costs.observe_prefill(forwards=1, tokens=10**6, seconds=1.0)  # type: ignore[union-attr]
    with BatchRunner(engine, chunk_budget=100) as runner:
        watched = Watched(engine, monkeypatch)
        started = threading.Event()
        stream = runner.submit(job(_TEXT[:50], 100, constrain=lambda tokens, logits: started.set()))
        started.wait(10)
        late = list(runner.submit(job(_TEXT[200:1200], 2)).events())
        assert len(ids(late)) == 2
        list(stream.events())
        assert reads(watched) == [50, *[100] * 10]


@pytest.mark.parametrize(("decoding", "expected"), [(False, [8192]), (True, [2048] * 4)])
def test_an_accelerator_reads_a_prompt_in_one_step_or_four(
    decoding: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = put(tiny_model("llama", num_hidden_layers=1, max_position_embeddings=9000), lambda _: "cuda:0")
    with Devices(), KVBoost(model, host_cache_bytes=0) as engine:
        limits = Limits(
            max_running=4, max_waiting=4, kv_bytes=10**9, chunk_budget=2048, max_step=8192, max_wait_steps=99
        )
        layout, session = engine.parts.layout, engine.session
        assert layout is not None
        assert session is not None
        forwards = Forwards.probe(engine.parts.runner, layout)
        bytes_for = session.budget.bytes_for
        loop = JobLoop(engine.parts, forwards, limits, bytes_for=bytes_for, rules=LoopRules(approx=False, raises=True))
        watched = Watched(engine, monkeypatch)
        jobs = [job(_TEXT[:20], 40)] if decoding else []
        loop.run(
            [
                RunningJob(one, session=session, ticket=Ticket(lambda: None), parts=engine.parts, max_step=2048)
                for one in [*jobs, job(_TEXT, 1)]
            ]
        )
    assert [rows for rows in reads(watched) if rows > 20] == expected
