from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost import EngineConfig, KVBoost
from kvboost.engine import memory as planning
from kvboost.engine.memory import forecast, memory_available, shortfall
from kvboost.errors import ConfigError
from kvboost.scheduler.runner import BatchRunner
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    kinds = ["sliding_attention", "full_attention"] * 3
    model = tiny_model(
        "gemma3_text", vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=6, layer_types=kinds
    )
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def engine(folder: Path) -> Iterator[KVBoost]:
    with KVBoost.from_pretrained(str(folder), device="cpu", chunk_size=16, cache_bytes="10MB") as made:
        yield made


def planned(folder: Path, **given: Any) -> planning.Forecast:
    asked: dict[str, Any] = {"context": 300, "batch": 2, "device": "cpu", "measure": False, "load_tokenizer": False}
    config = EngineConfig(chunk_size=16, cache_bytes="10MB")
    return forecast(str(folder), **(asked | {"config": config} | given))


def test_a_folder_and_the_model_loaded_from_it_have_the_same_plan(folder: Path, engine: KVBoost) -> None:
    ahead, loaded = planned(folder).plan, engine.memory_plan(context=300, batch=2)
    assert ahead.kv == loaded.kv
    assert ahead.activations == loaded.activations
    assert ahead.cache == loaded.cache == 10**7
    # Rotary tables are made by the model and are in no checkpoint.
    assert 0 <= loaded.weights.memory - ahead.weights.memory < 10_000


def test_the_plan_is_what_the_workspaces_take(engine: KVBoost) -> None:
    assert engine.parts is not None
    plan = engine.memory_plan(context=300, batch=3)
    assert plan.kv_reserved == 3 * engine.session.prefiller.pool.bytes_for(300)
    cache, _ = engine.session.prefiller.pool.take(rows=300, chain=())
    assert 3 * cache.nbytes == plan.kv_reserved


def test_what_was_stored_is_what_the_store_holds(engine: KVBoost) -> None:
    engine.warm([i % 200 + 3 for i in range(320)])
    held = engine._store.stats()
    tokens = sum(chunk.tokens for chunk in engine.hottest_chunks(100))
    assert held.bytes == engine.memory_plan(context=320, stored_tokens=tokens).cache


@pytest.mark.parametrize("bits", [8, 4])
def test_fewer_bits_take_what_the_codec_packs(folder: Path, bits: int) -> None:
    with KVBoost.from_pretrained(
        str(folder), device="cpu", chunking="fixed", chunk_size=64, kv_cache_bits=bits
    ) as made:
        made.warm([i % 200 + 3 for i in range(64 * 5 + 1)])
        held = made._store.stats().bytes
        plan = made.memory_plan(context=320, stored_tokens=320)
    assert held == pytest.approx(plan.cache, rel=0.02)  # the first row is kept as it is


def test_a_budget_is_planned_as_it_is_loaded(folder: Path) -> None:
    whole = planned(folder).plan.weights.memory
    ahead = planned(folder, weight_budget=whole * 4 // 5).plan.weights
    with KVBoost.from_pretrained(str(folder), device="cpu", weight_budget=whole * 4 // 5) as made:
        loaded = made.memory_plan(context=10).weights
    assert ahead.streamed == loaded.streamed > 0
    assert ahead.memory == loaded.memory <= whole * 4 // 5
    with pytest.raises(ConfigError, match="too small"):
        planned(folder, weight_budget=100)


def test_pages_are_planned_as_the_engine_makes_them(folder: Path) -> None:
    settings: dict[str, Any] = {"kv_bytes": 200_000, "chunk_size": 16, "cache_bytes": "10MB"}
    ahead = planned(folder, context=500, config=EngineConfig(**settings)).plan
    assert ahead.kv_spilled > 0
    with KVBoost.from_pretrained(str(folder), device="cpu", **settings) as made:
        loaded = made.memory_plan(context=500, batch=2)
        assert (loaded.kv, loaded.kv_spilled) == (ahead.kv, ahead.kv_spilled)
        assert loaded.kv <= 2 * 200_000


def test_another_dtype_is_held_beside_its_source_while_loading(folder: Path) -> None:
    plain, converted = planned(folder).plan, planned(folder, dtype="bfloat16").plan
    assert plain.weights.converted_from == 0
    assert converted.weights.memory * 2 == plain.weights.memory
    assert converted.weights.converted_from >= plain.weights.memory


def test_measured_speeds_come_with_the_options(folder: Path) -> None:
    found = planned(folder, measure=True)
    assert found.rates is not None
    assert min(found.rates.memory, found.rates.multiply, found.rates.disk) > 0
    assert all(option.speed is not None for option in found.options)


def test_a_model_without_reuse_has_no_plan(engine: KVBoost) -> None:
    engine.parts, engine.parts.refusal = None, "as told"
    with pytest.raises(ConfigError, match="as told"):
        engine.memory_plan(context=10)


def test_containers_limit_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"memory.max": 10**9, "memory.current": 4 * 10**8, "memory.stat": 10**8, "meminfo": 10**7}
    monkeypatch.setattr(planning, "_number", lambda file, pattern: limits[Path(file).name])
    assert memory_available() == 7 * 10**8
    limits["memory.max"] = 10**12
    assert memory_available() == 10**7 * 1024


def test_a_server_says_what_does_not_fit(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = engine.memory_plan(context=100)
    assert shortfall(plan, kv_bytes=10**9, room=plan.peak - plan.kv + 10**9) is None
    assert "lower kv_bytes, cache_bytes" in str(shortfall(plan, kv_bytes=10**9, room=plan.peak))
    with BatchRunner(engine, kv_bytes="1GB") as runner:
        monkeypatch.setattr("kvboost.scheduler.runner.memory_available", lambda device: 10**13)
        assert runner.shortfall() is None
        monkeypatch.setattr("kvboost.scheduler.runner.memory_available", lambda device: 10**6)
        assert "with 1.0 GB of KV" in str(runner.shortfall())


_MEASURE = """
import gc, re
from pathlib import Path
import torch
from kvboost import KVBoost
from kvboost.engine.memory import resident_bytes
from tests.helpers.models import tiny_model

model = tiny_model(
    "llama", hidden_size=64, num_hidden_layers=24, head_dim=64, num_key_value_heads=4, max_position_embeddings=4096
)
with KVBoost(model, quality="exact") as engine:
    engine.generate([3, 4, 5], max_new_tokens=2)
    plan = engine.memory_plan(context=3000, stored_tokens=3000)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    torch.manual_seed(0)
    engine.prefill(torch.randint(3, 90, (2999,)).tolist())
    peak = re.search(r"^VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
print(int(peak[1]) * 1024 - before, plan.kv + plan.cache + plan.activations.peak)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is measured as Linux tells it")
def test_the_peak_is_about_what_was_planned() -> None:
    """A model that is nearly all KV, in a process of its own: here, memory that other tests left is used again."""
    root = Path(__file__).parents[2]
    said = subprocess.run(
        [sys.executable, "-c", _MEASURE], cwd=root, capture_output=True, text=True, check=True, timeout=120
    )
    grown, expected = map(int, said.stdout.split())
    assert 0.8 * expected < grown < 1.2 * expected, (grown, expected)
