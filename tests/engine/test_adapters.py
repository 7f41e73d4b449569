"""The engine owns adapters: each has its own KV, requests of different ones are never mixed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from peft.utils.hotswap import hotswap_adapter

from kvboost import ConfigError, KVBoost
from kvboost.errors import ClosedError
from kvboost.scheduler.jobs import Finished, Job, NewToken
from kvboost.scheduler.runner import BatchRunner
from tests.helpers.models import tiny_model

_PROMPT = torch.randint(3, 97, (70,), generator=torch.Generator().manual_seed(8)).tolist()
_SETTINGS: dict[str, Any] = {"chunk_size": 16, "chunking": "fixed", "quality": "exact"}
_GREEDY: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folders of two adapters that change the answer to ``_PROMPT``."""
    root: Path = tmp_path_factory.mktemp("adapters")
    for seed, name in ((1, "first"), (2, "second")):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            get_peft_model(tiny_model("llama"), config).save_pretrained(root / name)
    return lambda name: str(root / name)


def engine_with(saved: Callable[[str], str], **settings: Any) -> KVBoost:
    engine = KVBoost(tiny_model("llama"), **{**_SETTINGS, **settings})
    for name in ("first", "second"):
        engine.load_adapter(name, saved(name))
    return engine


def expected(saved: Callable[[str], str], adapter: str | None) -> tuple[int, ...]:
    """What a fresh engine with this adapter alone says."""
    engine = KVBoost(tiny_model("llama"), **_SETTINGS)
    if adapter is not None:
        engine.load_adapter(adapter, saved(adapter))
    return engine.generate(_PROMPT, adapter=adapter, **_GREEDY).token_ids


def test_every_adapter_has_its_own_answer_and_its_own_kv(saved: Callable[[str], str]) -> None:
    engine = engine_with(saved)
    answers = {name: expected(saved, name) for name in (None, "first", "second")}
    assert len(set(answers.values())) == 3, "the adapters must make a difference, or this test shows nothing"
    for again in (False, True):
        for name, answer in answers.items():
            result = engine.generate(_PROMPT, adapter=name, **_GREEDY)
            assert result.token_ids == answer
            assert result.cached_tokens == (len(_PROMPT) - 1 if again else 0)
            assert result.reuse.bitwise
    engine.set_adapter("second")
    assert engine.generate(_PROMPT, **_GREEDY).token_ids == answers["second"]
    engine.set_adapter(None)
    assert engine.generate(_PROMPT, **_GREEDY).token_ids == answers[None]
    assert engine.generate_batch([_PROMPT, _PROMPT[:40]], adapter="first", **_GREEDY)[0].token_ids == answers["first"]
    assert engine.prefill(_PROMPT, adapter="first").reuse.exact_tokens == len(_PROMPT) - 1
    with pytest.raises(ConfigError, match="load it with load_adapter"):
        engine.generate(_PROMPT, adapter="third")


def test_an_adapter_swapped_behind_our_back_is_told_of(saved: Callable[[str], str]) -> None:
    """``hotswap_adapter`` copies into the same tensors: id, version and address stay."""
    model = get_peft_model(
        tiny_model("llama"), LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"])
    ).eval()
    hotswap_adapter(model, saved("first"), adapter_name="default")
    engine = KVBoost(model, **_SETTINGS)
    assert engine.generate(_PROMPT, **_GREEDY).token_ids == expected(saved, "first")
    hotswap_adapter(model, saved("second"), adapter_name="default")
    engine.weights_changed()
    result = engine.generate(_PROMPT, **_GREEDY)
    assert result.cached_tokens == 0, "KV of the adapter before"
    assert result.token_ids == expected(saved, "second")


def test_replacing_an_adapter_through_the_engine_needs_no_telling(saved: Callable[[str], str]) -> None:
    engine = engine_with(saved)
    engine.generate(_PROMPT, adapter="first", **_GREEDY)
    engine.load_adapter("first", saved("second"), replace=True)
    result = engine.generate(_PROMPT, adapter="first", **_GREEDY)
    assert result.token_ids == expected(saved, "second")


def test_threads_with_different_adapters_get_their_own_answers(saved: Callable[[str], str]) -> None:
    engine = engine_with(saved)
    answers = {name: expected(saved, name) for name in (None, "first", "second")}
    wrong: list[Any] = []

    def ask(name: str | None) -> None:
        for _ in range(6):
            found = engine.generate(_PROMPT, adapter=name, **_GREEDY).token_ids
            if found != answers[name]:
                wrong.append((name, found))

    threads = [threading.Thread(target=ask, args=(name,)) for name in answers for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_jobs_do_not_go_on_across_a_switch(saved: Callable[[str], str]) -> None:
    engine = engine_with(saved)
    plain = expected(saved, None)
    with BatchRunner(engine) as runner:
        job = Job(token_ids=tuple(_PROMPT), max_new_tokens=400)
        events = runner.submit(job).events()
        first = [next(events) for _ in range(3)]
        engine.set_adapter("second")
        rest = list(events)
        assert isinstance(rest[-1], Finished)
        assert rest[-1].reason == "error"
        assert "submit it again" in str(rest[-1].error)
        drawn = [event.token_id for event in [*first, *rest] if isinstance(event, NewToken)]
        assert tuple(drawn[:12]) == plain[: len(drawn)], "no token of the other adapter"
        again = runner.submit(Job(token_ids=tuple(_PROMPT), max_new_tokens=12)).events()
        found = tuple(event.token_id for event in again if isinstance(event, NewToken))
    assert found == expected(saved, "second")


def test_a_switch_through_the_model_itself_is_seen_by_running_jobs(saved: Callable[[str], str]) -> None:
    engine = engine_with(saved)
    engine.set_adapter("first")
    with BatchRunner(engine) as runner:
        events = runner.submit(Job(token_ids=tuple(_PROMPT), max_new_tokens=400)).events()
        next(events)
        engine.model.set_adapter("second")
        last = list(events)[-1]
    assert isinstance(last, Finished)
    assert last.reason == "error"


def test_a_job_that_waited_through_a_switch_is_not_answered_by_the_other_adapter(saved: Callable[[str], str]) -> None:
    engine = engine_with(saved)
    with BatchRunner(engine, max_running=1) as runner:
        first = runner.submit(Job(token_ids=tuple(_PROMPT), max_new_tokens=400))
        waiting = runner.submit(Job(token_ids=tuple(_PROMPT), max_new_tokens=4))
        next(first.events())
        engine.set_adapter("second")
        last = list(waiting.events())[-1]
        assert isinstance(last, Finished)
        assert "submit it again" in str(last.error)


def test_an_adapter_that_does_not_fit_is_not_left_behind(saved: Callable[[str], str], tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    get_peft_model(tiny_model("llama", hidden_size=64), config).save_pretrained(tmp_path / "wide")
    engine = KVBoost(tiny_model("llama"), **_SETTINGS)
    with pytest.raises(ConfigError, match="made for this model"):
        engine.load_adapter("wide", str(tmp_path / "wide"))
    with pytest.raises(ConfigError, match="there is no adapter 'wide'"):
        engine.generate(_PROMPT, adapter="wide", **_GREEDY)
    engine.load_adapter("wide", saved("first"))
    assert engine.generate(_PROMPT, adapter="wide", **_GREEDY).token_ids == expected(saved, "first")


def test_weights_changed_looks_at_rope_and_config_again() -> None:
    model = tiny_model("llama")
    engine = KVBoost(model, **_SETTINGS)
    engine.warm(_PROMPT)
    model.model.rotary_emb.inv_freq.mul_(0.5)
    model.model.rotary_emb.original_inv_freq = model.model.rotary_emb.inv_freq
    engine.weights_changed()
    assert engine.prefill(_PROMPT).reuse.exact_tokens == 0


def test_a_closed_engine_takes_no_jobs(saved: Callable[[str], str]) -> None:
    engine = KVBoost(tiny_model("llama"), **_SETTINGS)
    with BatchRunner(engine) as runner:
        engine.close()
        with pytest.raises(ClosedError, match="was closed"):
            runner.submit(Job(token_ids=tuple(_PROMPT), max_new_tokens=1))


def test_experts_that_decoding_switches_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread's decode loop changes the kernels of the whole model: nobody else may prefill meanwhile."""
    monkeypatch.setattr("kvboost.hf.fingerprint._switches_experts_to_decode", lambda model: True)
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("grouped_mm")
    engine = KVBoost(model, **_SETTINGS)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (engine.warm(_PROMPT), done.set()))
    with engine.parts.running():
        thread.start()
        assert not done.wait(0.3)
    thread.join()
    assert done.is_set()


def test_one_request_under_another_adapter_does_not_disturb_jobs(saved: Callable[[str], str]) -> None:
    engine = engine_with(saved)
    plain, first = expected(saved, None), expected(saved, "first")
    with BatchRunner(engine) as runner:
        events = runner.submit(Job(token_ids=tuple(_PROMPT), max_new_tokens=12)).events()
        begun = next(events)
        assert engine.generate(_PROMPT, adapter="first", **_GREEDY).token_ids == first
        drawn = [event.token_id for event in [begun, *events] if isinstance(event, NewToken)]
    assert tuple(drawn) == plain


def test_the_next_process_finds_what_was_kept_under_any_adapter(saved: Callable[[str], str], tmp_path: Path) -> None:
    """Tiers are opened once; the adapter in use then must not decide what is found later."""
    for found in (0, len(_PROMPT) - 1):
        model = tiny_model("llama")
        if found:
            model.load_adapter(saved("first"), adapter_name="first")  # in use when the tiers are opened
        with KVBoost(model.eval(), **_SETTINGS, disk_cache_dir=tmp_path) as engine:
            for name in ("second",) if found else ("first", "second"):
                engine.load_adapter(name, saved(name))
            store: Any = engine._store
            store._loader.rules = replace(store._loader.rules, compute_seconds=None)  # load, however fast computing is
            for name in (None, "first", "second"):
                result = engine.prefill(_PROMPT, adapter=name)
                assert result.reuse.exact_tokens == found, name
            engine.flush()


def test_an_adapter_that_multiplies_in_its_own_way_is_refused_before_bits_differ(tmp_path: Path) -> None:
    config = LoHaConfig(r=4, target_modules=["q_proj", "v_proj"])
    get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path)
    engine = KVBoost(tiny_model("llama"), **_SETTINGS)
    engine.prefill(_PROMPT)
    engine.load_adapter("loha", str(tmp_path))
    with pytest.raises(ConfigError, match="make a new engine around the model"):
        engine.prefill(_PROMPT, adapter="loha")
    again = KVBoost(engine.model, **_SETTINGS)  # on a grid
    again.prefill(_PROMPT, adapter="loha")
    assert again.prefill([*_PROMPT, *_PROMPT], adapter="loha").reuse.bitwise
