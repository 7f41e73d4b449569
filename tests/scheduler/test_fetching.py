"""Stored KV is loaded before a job runs: the thread that decodes asks no tier, however slow one is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from kvboost import CapacityError, GenerationMode, KVBoost
from kvboost.scheduler import fetching
from kvboost.scheduler.jobs import Finished, Job, NewToken, Ticket
from kvboost.scheduler.loop import JobLoop
from kvboost.scheduler.runner import BatchRunner
from kvboost.types import KVBlock
from tests.helpers.models import tiny_model

_TEXT = torch.randint(3, 97, (300,), generator=torch.Generator().manual_seed(7)).tolist()
_STORED, _OTHER = _TEXT[:64], _TEXT[200:205]
_DECODING = "kvboost-batch"
_ASKED = ("contains", "variants", "load")


def _job(tokens: Sequence[int], new: int, **fields: Any) -> Job:
    return Job(token_ids=tuple(tokens), max_new_tokens=new, **fields)


def _engine(directory: Path, model: Any, **settings: Any) -> KVBoost:
    """An engine that loads whatever it finds: computing with a tiny model is nearly always faster."""
    engine = KVBoost(model, None, chunk_size=8, chunking="fixed", disk_cache_dir=directory, **settings)
    _always_load(engine)
    return engine


def _always_load(engine: Any) -> None:
    loader = engine._store._loader
    loader.rules = replace(loader.rules, compute_seconds=None)


class Gated:
    """Notes which threads ask a store's tier, and lets it load once ``open`` is set."""

    def __init__(self, engine: Any) -> None:
        self.open, self.began = threading.Event(), threading.Event()
        self.threads: set[str] = set()
        tier = engine._store._of(engine.config.tenant).tiers[0]
        for name in _ASKED:
            if hasattr(tier, name):
                setattr(tier, name, self._noted(getattr(tier, name), waits=name == "load"))

    def _noted(self, method: Callable[..., Any], *, waits: bool) -> Callable[..., Any]:
        def asked(keys: Sequence[bytes]) -> Any:
            self.threads.add(threading.current_thread().name)
            return self._loaded(method(keys)) if waits else method(keys)

        return asked

    def _loaded(self, blocks: Iterator[KVBlock | None]) -> Iterator[KVBlock | None]:
        self.began.set()
        assert self.open.wait(60)
        yield from blocks


def _take(events: Iterator[NewToken | Finished], count: int) -> None:
    for _ in range(count):
        assert isinstance(next(events), NewToken)


def _end(ticket: Ticket) -> tuple[tuple[int, ...], Finished]:
    *tokens, last = ticket.events()
    assert isinstance(last, Finished)
    return tuple(event.token_id for event in tokens if isinstance(event, NewToken)), last


def _alone(engine: KVBoost, tokens: Sequence[int], new: int) -> tuple[int, ...]:
    wanted = {"max_new_tokens": new, "temperature": 0, "eos_token_id": None, "pad_token_id": 0}
    return engine.generate(list(tokens), mode=GenerationMode.BASELINE, **wanted).token_ids


@pytest.fixture
def stored(tiny: Callable[..., Any], tmp_path: Path) -> Path:
    with _engine(tmp_path, tiny("llama")) as engine:
        for view in (engine, engine.for_tenant("b")):
            view.warm(_STORED)
            view.flush()
    return tmp_path


@pytest.mark.parametrize("first", [True, False], ids=["its tenant's first job", "a later one"])
def test_others_decode_while_a_tier_is_waited_for(tiny: Callable[..., Any], stored: Path, first: bool) -> None:
    with _engine(stored, tiny("llama")) as engine, BatchRunner(engine) as runner:
        view = engine.for_tenant("b")
        _always_load(view)
        gated = Gated(view)
        if not first:
            _end(runner.submit(_job(_OTHER, 1, tenant="b")))
        decoding = runner.submit(_job(_OTHER, 300))
        events = decoding.events()
        _take(events, 1)
        ticket = runner.submit(_job([*_STORED, 5], 4, tenant="b"))
        assert gated.began.wait(30)
        _take(events, 50)
        assert (runner.load().running, runner.load().waiting) == (1, 1)
        passing = runner.submit(_job([9, 9, 9], 4))  # of a tenant whose tiers answer
        assert _end(passing)[1].reason == "length"
        gated.open.set()
        tokens, last = _end(ticket)
        decoding.cancel()
        assert tokens == _alone(engine, [*_STORED, 5], 4)
    assert last.report is not None
    assert (last.report.exact_tokens, dict(last.report.tiers)) == (64, {"disk": 64})
    assert last.report.bitwise
    assert gated.threads
    assert _DECODING not in gated.threads


def test_a_tier_that_does_not_answer_is_given_up(
    tiny: Callable[..., Any], stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MIN_SECONDS", "_UNKNOWN_SECONDS"):
        monkeypatch.setattr(fetching, name, 0.3)
    with _engine(stored, tiny("llama")) as engine:
        gated = Gated(engine)
        with BatchRunner(engine) as runner:
            began = time.monotonic()
            tickets = [runner.submit(_job([*_STORED, 5, number], 4)) for number in range(2)]  # the second one queues
            found = [_end(ticket) for ticket in tickets]
            assert time.monotonic() - began < 20
            assert gated.began.is_set()
        gated.open.set()
        assert [tokens for tokens, _ in found] == [_alone(engine, [*_STORED, 5, number], 4) for number in range(2)]
    assert found[0][1].report is not None
    assert found[0][1].report.exact_tokens == 0
    assert _DECODING not in gated.threads


def test_a_tier_that_fails_costs_the_reuse_only(tiny: Callable[..., Any], stored: Path) -> None:
    with _engine(stored, tiny("llama")) as engine, BatchRunner(engine) as runner:
        tier: Any = engine._store._own.tiers[0]  # type: ignore[attr-defined]
        tier.load = lambda keys: (_ for _ in ()).throw(OSError("gone"))
        with pytest.warns(RuntimeWarning, match="tier: it failed"):
            tokens, last = _end(runner.submit(_job([*_STORED, 5], 4)))
        assert tokens == _alone(engine, [*_STORED, 5], 4)
        assert last.reason == "length"


def test_a_load_that_cannot_be_tried_again_ends_its_job_only(
    tiny: Callable[..., Any], stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fetching.JobFetch.retry

    def retry(self: fetching.JobFetch) -> None:
        if self._prompt.tokens[-1] == 6:
            raise RuntimeError("can't start new thread")
        right(self)

    monkeypatch.setattr(fetching.JobFetch, "retry", retry)
    with _engine(stored, tiny("llama")) as engine, BatchRunner(engine) as runner:
        _end(runner.submit(_job(_OTHER, 1)))
        gated = Gated(engine)
        left, failed = (runner.submit(_job([*_STORED, last], 4)) for last in (5, 6))
        decoding = runner.submit(_job(_OTHER, 300))  # while it does, others' loads are looked at
        assert _end(failed)[1].error == "RuntimeError: can't start new thread"
        gated.open.set()
        assert _end(left)[0] == _alone(engine, [*_STORED, 5], 4)
        decoding.cancel()
        assert runner.load().alive


def test_nothing_is_done_while_every_job_waits_for_a_tier(
    tiny: Callable[..., Any], stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = [], JobLoop.step
    monkeypatch.setattr(JobLoop, "step", lambda *args: (steps.append(1), step(*args)))
    with _engine(stored, tiny("llama")) as engine, BatchRunner(engine) as runner:
        gated = Gated(engine)
        ticket = runner.submit(_job([*_STORED, 5], 1))
        left = runner.submit(_job([*_STORED, 6], 1))
        assert gated.began.wait(30)
        time.sleep(0.5)
        waited = len(steps)
        left.cancel()
        assert _end(left)[1].reason == "cancelled", "a job that waits is cancelled at once"
        gated.open.set()
        assert _end(ticket)[1].reason == "length"
    assert waited < 20


def test_nothing_is_loaded_for_a_job_that_is_refused(tiny: Callable[..., Any], stored: Path) -> None:
    with _engine(stored, tiny("llama"), kv_bytes="150kB") as engine, BatchRunner(engine) as runner:
        _end(runner.submit(_job(_OTHER, 1)))
        gated = Gated(engine)
        with pytest.raises(CapacityError, match="lower max_new_tokens"):
            runner.submit(_job([*_STORED, *_STORED, 5], 300))
        engine._store._own.background.close()  # type: ignore[attr-defined]
    assert not gated.threads


def test_text_that_stands_elsewhere_is_loaded_before(tiny: Callable[..., Any], stored: Path) -> None:
    settings = {"quality": "high", "force_approx": True, "recompute_ratio": 1.0}
    with _engine(stored, tiny("llama"), **settings) as engine, BatchRunner(engine) as runner:
        gated = Gated(engine)
        gated.open.set()
        prompt = [*_TEXT[150:158], *_STORED[8:24], 5]
        _, last = _end(runner.submit(_job(prompt, 4)))
    assert last.report is not None
    assert (last.report.moved_tokens, dict(last.report.tiers)) == (16, {"disk": 16})
    assert _DECODING not in gated.threads


def test_the_end_of_an_earlier_prompt_is_loaded_before(tiny: Callable[..., Any], tmp_path: Path) -> None:
    with _engine(tmp_path, tiny("llama")) as engine:
        engine.warm(_TEXT[:67])
    with _engine(tmp_path, tiny("llama")) as engine, BatchRunner(engine) as runner:
        gated = Gated(engine)
        gated.open.set()
        _, last = _end(runner.submit(_job([*_TEXT[:67], 5, 6], 4)))
    assert last.report is not None
    assert (last.report.exact_tokens, dict(last.report.tiers)) == (67, {"disk": 67})
    assert _DECODING not in gated.threads


def _with_adapters(directory: Path, names: Sequence[str]) -> KVBoost:
    engine = _engine(directory / "cache", tiny_model("llama"), quality="exact")
    for name in names:
        engine.load_adapter(name, str(directory / name))
    return engine


def test_jobs_of_adapters_load_before_they_run(tmp_path: Path) -> None:
    names = ("first", "second")
    for seed, name in enumerate(names, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path / name)
    texts = [_TEXT[:64], _TEXT[64:128]]
    with _with_adapters(tmp_path, names) as engine:
        for text in texts:
            for adapter in (None, *names):
                engine.warm(text, adapter=adapter)
    with _with_adapters(tmp_path, names) as engine, BatchRunner(engine) as runner:
        gated = Gated(engine)
        gated.open.set()
        for text in texts:  # those of the second text know the keys at once
            tickets = {name: runner.submit(_job([*text, 5], 12, adapter=name)) for name in (*names, None, *names)}
            for name, ticket in tickets.items():
                tokens, last = _end(ticket)
                assert last.report is not None
                assert last.report.exact_tokens == 64, name
                wanted = engine.generate([*text, 5], adapter=name, max_new_tokens=12, temperature=0, eos_token_id=None)
                assert tokens == wanted.token_ids
    assert gated.threads
    assert _DECODING not in gated.threads
