from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvboost import ConfigError, KVBoost
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve import Keys, ServerConfig, serve


def test_threads_hand_over_the_interpreter_often_while_it_serves(
    make_engine: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def run(serving: Coroutine[Any, Any, None]) -> None:
        serving.close()
        seen.append(sys.getswitchinterval())

    monkeypatch.setattr("kvboost.serve.run.asyncio.run", run)
    before = sys.getswitchinterval()
    with make_engine() as engine, BatchRunner(engine) as runner:
        serve(engine, runner, ServerConfig(served_model_name="tiny", port=0))
    assert seen == [pytest.approx(0.001)]
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"served_model_name": None}, {}, r"ServerConfig\(served_model_name=\.\.\.\)"),
        ({"host": "0.0.0.0"}, {}, "API key"),
        ({"host": "192.0.2.1", "allow_open": True}, {}, "cannot listen on 192.0.2.1:8000"),
        ({"host": "192.0.2.1"}, {"keys": Keys(["key-of-somebody"])}, "cannot listen on 192.0.2.1:8000"),
    ],
)
def test_what_cannot_work_is_said(
    config: dict[str, Any], arguments: dict[str, Any], message: str, make_engine: Callable[..., KVBoost]
) -> None:
    runner: Any = None  # nothing gets so far as to run a job
    with make_engine() as engine, pytest.raises(ConfigError, match=message):
        serve(engine, runner, ServerConfig(**{"served_model_name": "tiny", **config}), **arguments)
