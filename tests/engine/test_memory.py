from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost import EngineConfig, KVBoost
from kvboost.capacity import shortfall
from kvboost.direct_io import DirectFile
from kvboost.engine import forecast as engine_memory
from kvboost.engine.estimate import memory_shortfall
from kvboost.engine.forecast import Forecast, forecast
from kvboost.errors import ConfigError
from kvboost.hf.loading import ModelSource
from kvboost.offload import rates
from kvboost.offload.rates import Rates, measure_rates
from kvboost.scheduler.runner import BatchRunner
from tests.helpers.models import tiny_model
from tests.helpers.packing import pack_all
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


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_memory, "measure_rates", lambda **_: Rates(memory=1e9, multiply=1e9, disk=1e9))


@pytest.fixture
def engine(folder: Path) -> Iterator[KVBoost]:
    with KVBoost.from_pretrained(str(folder), device="cpu", chunk_size=16, cache_bytes="10MB") as made:
        yield made


def of(folder: Path, config: EngineConfig | None = None, *, dtype: str = "auto", **given: Any) -> Forecast:
    config = config or EngineConfig(chunk_size=16, cache_bytes="10MB")
    source = ModelSource(str(folder), dtype=dtype, device="cpu")
    return forecast(source, config, **({"context": 300, "batch": 2} | given))


def test_a_folder_and_the_model_loaded_from_it_have_the_same_estimate(folder: Path, engine: KVBoost) -> None:
    ahead, loaded = of(folder).estimate, engine.estimate_memory(context=300, batch=2)
    assert ahead.kv == loaded.kv
    assert ahead.activations == loaded.activations
    assert ahead.cache == loaded.cache == 10**7
    # Rotary tables are made by the model and are in no checkpoint.
    assert 0 <= loaded.weights.in_memory - ahead.weights.in_memory < 10_000


def test_the_estimate_is_what_the_workspaces_take(engine: KVBoost) -> None:
    assert engine.session is not None
    estimate = engine.estimate_memory(context=300, batch=3)
    assert estimate.kv_reserved == 3 * engine.session.prefiller.pool.bytes_for(300)
    cache, _ = engine.session.prefiller.pool.take(tokens=300, chain=())
    assert 3 * cache.nbytes == estimate.kv_reserved


def test_what_was_stored_is_what_the_store_holds(engine: KVBoost) -> None:
    engine.warm([i % 200 + 3 for i in range(320)])
    held = engine._store.stats()
    tokens = sum(chunk.tokens for chunk in engine.hottest_chunks(100))
    assert held.bytes == engine.estimate_memory(context=320, stored_tokens=tokens).cache


@pytest.mark.parametrize("bits", [8, 4])
def test_fewer_bits_take_what_the_codec_packs(folder: Path, bits: int) -> None:
    with KVBoost.from_pretrained(
        str(folder), device="cpu", chunking="fixed", chunk_size=64, kv_cache_bits=bits
    ) as made:
        made.warm([i % 200 + 3 for i in range(64 * 5 + 1)])
        held = made._store.stats().bytes
        estimate = made.estimate_memory(context=320, stored_tokens=320)
    assert held == pytest.approx(estimate.cache, rel=0.02)  # the first token is kept as it is


def test_a_budget_is_estimated_as_it_is_loaded(folder: Path) -> None:
    whole = of(folder).estimate.weights.in_memory
    ahead = of(folder, weight_budget=whole * 4 // 5).estimate.weights
    with KVBoost.from_pretrained(str(folder), device="cpu", weight_budget=whole * 4 // 5) as made:
        loaded = made.estimate_memory(context=10).weights
    assert ahead.streamed == loaded.streamed > 0
    assert ahead.in_memory == loaded.in_memory <= whole * 4 // 5
    with pytest.raises(ConfigError, match="too small"):
        of(folder, weight_budget=100)


def test_pages_are_estimated_as_the_engine_makes_them(folder: Path) -> None:
    settings: dict[str, Any] = {"kv_bytes": 200_000, "chunk_size": 16, "cache_bytes": "10MB"}
    ahead = of(folder, EngineConfig(**settings), context=500).estimate
    assert ahead.kv_spilled > 0
    with KVBoost.from_pretrained(str(folder), device="cpu", **settings) as made:
        loaded = made.estimate_memory(context=500, batch=2)
        assert (loaded.kv, loaded.kv_spilled) == (ahead.kv, ahead.kv_spilled)
        assert loaded.kv <= 2 * 200_000


def test_another_dtype_is_held_beside_its_source_while_loading(folder: Path) -> None:
    plain, converted = of(folder).estimate, of(folder, dtype="bfloat16").estimate
    assert plain.weights.converted_from == 0
    assert converted.weights.in_memory * 2 == plain.weights.in_memory
    assert converted.weights.converted_from >= plain.weights.in_memory


def test_measured_speeds_come_with_the_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_memory, "measure_rates", measure_rates)
    monkeypatch.setattr(rates, "_SECONDS", 0.001)
    found = of(folder)
    measured = found.machine.rates
    assert min(measured.memory, measured.multiply, measured.disk) > 0
    assert all(min(option.speed.prefill, option.speed.decode) > 0 for option in found.options)


@pytest.mark.parametrize("sizes", [[], [0], [10], [5000, 0]])
def test_files_too_small_to_tell_do_not_set_the_rate_of_the_disk(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    take = DirectFile.read
    monkeypatch.setattr(rates, "_SECONDS", 0.001)
    monkeypatch.setattr(DirectFile, "read", lambda *given: read.append(take(*given)) or read[-1])
    monkeypatch.setenv("TMPDIR", str(tmp_path / "made"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "made").mkdir()
    files = [tmp_path / str(at) for at in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(bytes(size))
    assert rates._disk_rate(files) > 0
    assert set(read) == {rates._PIECE}
    assert list((tmp_path / "made").iterdir()) == []


def test_a_model_without_reuse_has_no_estimate(engine: KVBoost) -> None:
    engine.session, engine.parts.refusal = None, "as told"
    with pytest.raises(ConfigError, match="as told"):
        engine.estimate_memory(context=10)


def test_a_server_says_what_does_not_fit(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = engine.estimate_memory(context=100)
    assert shortfall(estimate, kv_bytes=10**9, available=estimate.peak - estimate.kv + 10**9) is None
    assert "lower kv_bytes, cache_bytes" in str(shortfall(estimate, kv_bytes=10**9, available=estimate.peak))
    with BatchRunner(engine) as runner:
        monkeypatch.setattr("kvboost.engine.estimate.memory_available", lambda device: 10**13)
        assert memory_shortfall(engine.parts, engine.session, kv_bytes=runner.kv_bytes) is None
        monkeypatch.setattr("kvboost.engine.estimate.memory_available", lambda device: 10**6)
        assert "with 2.1 GB of KV" in str(memory_shortfall(engine.parts, engine.session, kv_bytes=runner.kv_bytes))


_MEASURE = """
import gc, re
from pathlib import Path
import torch
from kvboost import KVBoost
from kvboost.hf.device_memory import resident_bytes
from tests.helpers.models import tiny_model

model = tiny_model(
    "llama", hidden_size=64, num_hidden_layers=24, head_dim=64, num_key_value_heads=4, max_position_embeddings=4096
)
with KVBoost(model, quality="exact") as engine:
    engine.generate([3, 4, 5], max_new_tokens=2)
    estimate = engine.estimate_memory(context=3000, stored_tokens=3000)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    torch.manual_seed(0)
    engine.prefill(torch.randint(3, 90, (2999,)).tolist())
    peak = re.search(r"^VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
print(int(peak[1]) * 1024 - before, estimate.kv + estimate.cache + estimate.activations.peak)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is measured as Linux tells it")
def test_the_peak_is_about_what_was_estimated() -> None:
    """A model that is nearly all KV, in a process of its own: here, memory that other tests left is used again."""
    root = Path(__file__).parents[2]
    said = subprocess.run(
        [sys.executable, "-c", _MEASURE], cwd=root, capture_output=True, text=True, check=True, timeout=120
    )
    grown, expected = map(int, said.stdout.split())
    assert 0.8 * expected < grown < 1.2 * expected, (grown, expected)


def test_packed_weights_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    with KVBoost(model) as plain:
        before = plain.estimate_memory(context=100)
    pack_all(monkeypatch)
    with KVBoost(model) as packed:
        tiles = packed.parts.runner.tiles
        assert tiles is not None
        found = packed.estimate_memory(context=100)
        assert found.weights.packed == tiles.packed_bytes > 0
        assert "MB packed" in packed.describe()["weights"]
        monkeypatch.setattr("kvboost.engine.estimate.resident_bytes", lambda: 10**9)
        with_base = packed.estimate_memory(context=100)
    assert found.device_bytes - before.device_bytes == found.weights.packed - before.weights.packed
    assert sum(found.lines().values()) == found.peak
    assert with_base.runtime == 10**9 - with_base.weights.in_memory - with_base.weights.packed, (
        "not in the base as well"
    )
