"""Jobs of different adapters over one runner: they take turns, nobody starves, nothing is mixed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from kvboost import KVBoost
from kvboost.errors import ConfigError
from kvboost.scheduler.jobs import Job, NewToken
from kvboost.scheduler.queue import Limits, Scheduler
from kvboost.scheduler.runner import BatchRunner
from tests.helpers.models import tiny_model

_PROMPT = tuple(range(3, 40))
_NAMES = (None, "first", "second")


@pytest.fixture
def engine(tmp_path: Path) -> KVBoost:
    for seed, name in enumerate(_NAMES[1:], 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path / str(name))
    engine = KVBoost(tiny_model("llama"), chunk_size=16, chunking="fixed", quality="exact")
    for name in _NAMES[1:]:
        engine.load_adapter(str(name), str(tmp_path / str(name)))
    return engine


def _ids(ticket: Any) -> list[int]:
    return [event.token_id for event in ticket.events() if isinstance(event, NewToken)]


def test_every_job_runs_under_its_own_adapter(engine: KVBoost) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0}
    alone = {name: list(engine.generate(list(_PROMPT), adapter=name, **asked).token_ids) for name in _NAMES}
    assert len({tuple(ids) for ids in alone.values()}) == 3, "the adapters change the answer"
    engine.clear()
    with BatchRunner(engine, max_wait_steps=3) as runner:
        order = [*_NAMES, *_NAMES, *_NAMES]
        jobs = [Job(token_ids=_PROMPT, max_new_tokens=12, adapter=name) for name in order]
        tickets = [runner.submit(one) for one in jobs]
        assert [_ids(ticket) for ticket in tickets] == [alone[name] for name in order]
    assert engine.parts.active_adapters == (), "the model is as it was set"


def test_the_kv_of_one_adapter_is_never_anothers(engine: KVBoost) -> None:
    with BatchRunner(engine) as runner:
        reused = []
        for name in (*_NAMES, *_NAMES):
            *_, last = runner.submit(Job(token_ids=_PROMPT, max_new_tokens=1, adapter=name)).events()
            reused.append(last.report.exact_tokens)
    assert reused[:3] == [0, 0, 0]
    assert min(reused[3:]) > 0


def test_an_adapter_that_is_not_loaded_is_refused(engine: KVBoost) -> None:
    with BatchRunner(engine) as runner, pytest.raises(ConfigError, match="no adapter 'third'"):
        runner.submit(Job(token_ids=_PROMPT, max_new_tokens=1, adapter="third"))


def test_an_adapter_that_is_gone_ends_its_own_jobs_only(engine: KVBoost) -> None:
    submitted = threading.Event()

    def remove(tokens: list[int], logits: torch.Tensor) -> None:
        assert submitted.wait(30)
        if not tokens:
            engine.model.delete_adapter("second")

    with BatchRunner(engine) as runner:
        first = runner.submit(Job(token_ids=_PROMPT, max_new_tokens=4, constrain=remove))
        others = [
            runner.submit(Job(token_ids=_PROMPT, max_new_tokens=4, adapter=name)) for name in ("second", "first", None)
        ]
        submitted.set()
        *_, gone = others[0].events()
        assert (gone.reason, gone.refused) == ("error", True)
        assert "there is no adapter 'second'" in gone.error
        assert [len(_ids(ticket)) for ticket in (first, *others[1:])] == [4, 4, 4]
        assert runner.load().alive


def _scheduler(**limits: int) -> Scheduler:
    return Scheduler(
        Limits(
            **{"max_running": 4, "max_waiting": 50, "kv_bytes": 100, "chunk_budget": 8, "max_wait_steps": 3, **limits}
        )
    )


def test_only_one_group_runs_at_a_time() -> None:
    scheduler = _scheduler()
    numbers = [scheduler.add(tenant="t", nbytes=1, chain=(), group=group) for group in ("", "a", "", "a")]
    assert scheduler.group() == ""
    assert [scheduler.admit("") for _ in range(3)] == [numbers[0], numbers[2], None]
    for number in (numbers[0], numbers[2]):
        scheduler.remove(number)
    assert scheduler.group() == "a"
    assert [scheduler.admit("a") for _ in range(3)] == [numbers[1], numbers[3], None]


def test_a_group_that_has_waited_long_enough_gets_its_turn() -> None:
    scheduler = _scheduler()
    other = scheduler.add(tenant="t", nbytes=1, chain=(), group="a")
    scheduler.remove(other)
    running = scheduler.add(tenant="t", nbytes=1, chain=())
    assert scheduler.admit("") == running
    scheduler.opened(running, available=0, will_provide=0, steps=[])
    waiting = scheduler.add(tenant="t", nbytes=1, chain=(), group="a")
    for step in range(3):
        late = scheduler.add(tenant="t", nbytes=1, chain=())
        assert scheduler.admit("") == late, f"step {step}: it may still be overtaken"
        scheduler.remove(late)
        assert scheduler.preempt() is None
        scheduler.decoded(running)
        scheduler.tick()
    late = scheduler.add(tenant="t", nbytes=1, chain=())
    assert scheduler.admit("") is None, "nobody overtakes it any more"
    assert scheduler.preempt() == running
    assert scheduler.group() == "a"
    assert scheduler.admit("a") == waiting
    assert scheduler.admit("a") is None
    assert late != waiting
