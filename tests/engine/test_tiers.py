"""An engine with a directory below its memory: what the next process finds, and what trouble costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import ConfigError, KVBoost
from kvboost.bench.servers import RedisServer
from tests.engine.test_moving import HEAD, ONE, QUESTION, THREE, TWO, engine_for, read, text, warm

pytestmark = pytest.mark.usefixtures("prices_as_guessed")

Tiny = Callable[..., Any]
_LONG = text(11, 400)


def _same_bits(one: Any, other: Any) -> bool:
    layers = zip(one.cache.layers, other.cache.layers, strict=True)
    kv = all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in layers)
    return kv and torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_the_next_engine_reuses_what_the_last_one_read_bit_for_bit(family: str, tiny: Tiny, tmp_path: Path) -> None:
    first = engine_for(tiny(family), disk_cache_dir=tmp_path)
    cold = first.prefill(_LONG)
    first.flush()  # and no close: it might have been killed here
    second = engine_for(tiny(family), disk_cache_dir=tmp_path)
    warm_run = second.prefill(_LONG)
    assert warm_run.reuse.cached_tokens > 0.9 * len(_LONG)
    assert warm_run.reuse.bitwise
    assert _same_bits(warm_run, cold)
    first.close()
    second.close()


def test_two_engines_on_one_directory_reuse_what_the_other_computes(tiny: Tiny, tmp_path: Path) -> None:
    one, other = (engine_for(tiny("llama"), disk_cache_dir=tmp_path) for _ in range(2))
    for writer, reader, seed in ((one, other, 21), (other, one, 22)):
        prompt = text(seed, 300)
        computed = writer.prefill(prompt)
        writer.flush()
        found = reader.prefill(prompt)
        assert found.reuse.exact_tokens > 0
        assert _same_bits(found, computed)
    one.close()
    other.close()


def test_chunks_from_the_directory_can_be_moved(tiny: Tiny, tmp_path: Path) -> None:
    settings = {"recompute_ratio": 0.0, "move_at_any_price": True}
    first = engine_for(tiny("llama"), disk_cache_dir=tmp_path, **settings)
    warm(first, HEAD, ONE, TWO, THREE)
    moved_at_home = read(first, HEAD, THREE, ONE, TWO, QUESTION)
    first.flush()
    second = engine_for(tiny("llama"), disk_cache_dir=tmp_path, **settings)
    moved = read(second, HEAD, THREE, ONE, TWO, QUESTION)
    assert moved.reuse.moved_tokens == moved_at_home.reuse.moved_tokens > 0
    assert moved.reuse.approximate == "auto"
    first.close()
    second.close()


def test_another_model_and_another_tenant_find_nothing(tiny: Tiny, tmp_path: Path) -> None:
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as first:
        first.prefill(_LONG)
    others = (
        engine_for(tiny("qwen2"), disk_cache_dir=tmp_path),
        engine_for(tiny("llama"), disk_cache_dir=tmp_path, tenant="somebody else"),
        engine_for(tiny("llama"), disk_cache_dir=tmp_path, chunk_size=40),
    )
    for engine in others:
        assert engine.prefill(_LONG).reuse.cached_tokens == 0
        engine.clear()  # its own blocks, nobody else's
        engine.close()
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as again:
        assert again.prefill(_LONG).reuse.cached_tokens > 0


def test_a_damaged_directory_costs_a_warning_and_no_answer(tiny: Tiny, tmp_path: Path) -> None:
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as first:
        cold = first.prefill(_LONG)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.stat().st_size > 4096 and "index" not in file.name:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as second:
        with pytest.warns(RuntimeWarning, match="damaged"):
            again = second.prefill(_LONG)
        assert again.reuse.cached_tokens == 0
        assert _same_bits(again, cold)


def test_the_settings_say_what_is_wrong_with_them() -> None:
    with pytest.raises(ConfigError, match="disk_cache_bytes"):
        KVBoost.from_pretrained("nowhere", disk_cache_bytes="much")


_WRITER = """
import sys, torch
from tests.engine.test_moving import engine_for, text
from tests.helpers.models import tiny_model
engine = engine_for(tiny_model("llama"), disk_cache_dir=sys.argv[1])
engine.prefill(text(11, 400))
engine.flush()
print("flushed", flush=True)
seed = 100
while True:
    engine.prefill(text(seed, 400))
    seed += 1
"""


def test_what_was_flushed_survives_a_kill_in_the_middle_of_writing(tiny: Tiny, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"flushed\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as engine, engine_for(tiny("llama")) as fresh:
        found, cold = engine.prefill(_LONG), fresh.prefill(_LONG)
        assert found.reuse.cached_tokens > 0.9 * len(_LONG)
        assert _same_bits(found, cold)
        for seed in range(100, 110):  # whole or not at all
            assert _same_bits(engine.prefill(text(seed, 400)), fresh.prefill(text(seed, 400)))


def test_the_next_engine_reuses_what_lies_in_redis_bit_for_bit(tiny: Tiny, redis_at: RedisServer) -> None:
    first = engine_for(tiny("llama"), remote_url=redis_at.url)
    cold = first.prefill(_LONG)
    first.flush()
    second = engine_for(tiny("llama"), remote_url=redis_at.url)
    _reachable(second, _LONG)
    found = second.prefill(_LONG)
    assert found.reuse.cached_tokens > 0.9 * len(_LONG)
    assert found.reuse.bitwise
    assert _same_bits(found, cold)
    first.close()
    second.close()


def _reachable(engine: KVBoost, prompt: list[int]) -> None:
    """A tier of a busy machine may be out of patience: wait until it is not."""
    tier = engine._store._tiers[0]  # type: ignore[attr-defined]
    chunks = engine._parts.reader.names.chunks_of_part(prompt)  # type: ignore[union-attr]
    for _ in range(100):
        if tier.contains([chunks[0].prefix_key])[0]:
            return
        time.sleep(0.1)
    raise AssertionError("the server did not answer within ten seconds")
