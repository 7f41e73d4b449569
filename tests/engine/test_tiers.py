"""An engine with a directory below its memory: what the next process finds, and what trouble costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.faults import Fault, FaultyProxy
from benchmarks.common.servers import RedisServer
from kvboost import ConfigError, KVBoost
from kvboost.store import DiskTier, HostTier, MemoryStore, TieredStore
from kvboost.types import KVBlock
from tests.approx.test_find import HEAD, ONE, QUESTION, THREE, TWO, engine_for, read, text, warm

pytestmark = pytest.mark.usefixtures("prices_as_guessed")

Tiny = Callable[..., Any]
Blocks = Iterator[KVBlock | None]
_LONG = text(11, 400)


def patient(url: str) -> dict[str, Any]:
    """The settings of an engine that waits for this server, as busy as this machine may be."""
    return {"remote_url": url, "remote_timeout_seconds": 30.0}


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
    settings = {"quality": "high", "recompute_ratio": 0.0, "force_approx": True}
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


def test_the_settings_say_what_is_wrong_with_them(tiny: Tiny) -> None:
    for name in ("disk_cache_bytes", "host_cache_bytes"):
        with pytest.raises(ConfigError, match=name):
            KVBoost.from_pretrained("nowhere", **{name: "much"})
    with pytest.raises(ConfigError, match="raise cache_bytes instead"):
        engine_for(tiny("llama"), host_cache_bytes="1GiB")


def test_a_host_tier_below_a_small_memory_changes_no_bit(tiny: Tiny) -> None:
    with engine_for(tiny("llama"), quality="exact") as plain:
        cold = plain.prefill(_LONG)
        each = plain.cache_stats()["hot_memory_mb"] * 1e6 / plain.cache_stats()["hot_chunks"]
    host = HostTier(10**9)
    store = TieredStore(MemoryStore(int(16 * each)), [host])
    with engine_for(tiny("llama"), quality="exact", store=store, workspace_bytes=0) as engine:
        engine.prefill(_LONG)
        engine.prefill(text(12, 400))  # takes its place
        engine.flush()
        found = engine.prefill(_LONG)
        assert found.reuse.tiers["host"] > 0
        assert _same_bits(found, cold)
    store.close()


_WRITER = """
import sys, torch
from tests.approx.test_find import engine_for, text
from tests.helpers.models import tiny_model
engine = engine_for(tiny_model("llama"), **{sys.argv[1]: sys.argv[2]}, remote_timeout_seconds=30.0)
engine.prefill(text(11, 400))
engine.flush()
print("flushed", flush=True)
seed = 100
while True:
    engine.prefill(text(seed, 400))
    seed += 1
"""


@pytest.mark.parametrize("setting", ["disk_cache_dir", "remote_url"])
def test_what_was_flushed_survives_a_kill_in_the_middle_of_writing(
    setting: str, tiny: Tiny, request: pytest.FixtureRequest
) -> None:
    place = str(
        request.getfixturevalue("tmp_path") if setting == "disk_cache_dir" else request.getfixturevalue("redis_at").url
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, setting, place],
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
    with (
        engine_for(tiny("llama"), **{setting: place}, remote_timeout_seconds=30.0) as engine,
        engine_for(tiny("llama")) as fresh,
    ):
        found, cold = engine.prefill(_LONG), fresh.prefill(_LONG)
        assert found.reuse.cached_tokens > 0.9 * len(_LONG)
        assert _same_bits(found, cold)
        for seed in range(100, 110):  # whole or not at all
            assert _same_bits(engine.prefill(text(seed, 400)), fresh.prefill(text(seed, 400)))


def test_the_next_engine_reuses_what_lies_in_redis_bit_for_bit(tiny: Tiny, redis_at: RedisServer) -> None:
    first = engine_for(tiny("llama"), **patient(redis_at.url))
    cold = first.prefill(_LONG)
    first.flush()
    second = engine_for(tiny("llama"), **patient(redis_at.url))
    found = second.prefill(_LONG)
    assert found.reuse.cached_tokens > 0.9 * len(_LONG)
    assert found.reuse.bitwise
    assert _same_bits(found, cold)
    first.close()
    second.close()


def test_a_server_that_answers_late_is_waited_for_as_long_as_was_said(tiny: Tiny, redis_at: RedisServer) -> None:
    with FaultyProxy(redis_at.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        with engine_for(tiny("llama"), **patient(url)) as first:
            first.prefill(_LONG)
            first.flush()
        with (
            engine_for(tiny("llama"), **patient(url)) as waits,
            engine_for(tiny("llama"), remote_url=url, remote_timeout_seconds=0.1) as gives_up,
        ):
            proxy.fault = Fault.LATE
            assert waits.prefill(_LONG).reuse.cached_tokens > 0.9 * len(_LONG)
            with pytest.warns(RuntimeWarning, match="cannot be used"):
                assert gives_up.prefill(_LONG).reuse.cached_tokens == 0


# What a result says of the tiers, and what goes on while a load is under way


def _chain(reused: Any) -> dict[str, int]:
    return dict(reused.reuse.tiers)


def test_a_result_says_which_tier_its_tokens_came_from(tiny: Tiny, tmp_path: Path) -> None:
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as first:
        cold = first.prefill(_LONG)
        assert (_chain(cold), cold.reuse.declined_tokens, cold.reuse.declined) == ({}, 0, ())
        again = first.prefill(_LONG)
        assert _chain(again) == {"memory": again.reuse.exact_tokens}
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as second:
        second.prefill(_LONG[:100])
        some = second.prefill(_LONG[:100]).reuse.exact_tokens
        found = second.prefill(_LONG)
        assert found.reuse.exact_tokens > some > 0
        assert set(_chain(found)) == {"memory", "disk"}
        assert sum(_chain(found).values()) == found.reuse.exact_tokens
        generated = second.generate(_LONG, max_new_tokens=2)
        assert _chain(generated) == {"memory": generated.cached_tokens}


def test_a_result_says_what_was_moved_from_where(tiny: Tiny, tmp_path: Path) -> None:
    settings = {"quality": "high", "recompute_ratio": 0.0, "force_approx": True}
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path, **settings) as first:
        warm(first, HEAD, ONE, TWO, THREE)
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path, **settings) as second:
        moved = read(second, HEAD, THREE, ONE, TWO, QUESTION)
        assert moved.reuse.moved_tokens > 0
        assert _chain(moved) == {"disk": moved.reuse.cached_tokens}


def test_a_result_says_what_was_computed_because_loading_is_slow(tiny: Tiny, tmp_path: Path) -> None:
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as first:
        cold = first.prefill(_LONG)
        cached = first.prefill(_LONG).reuse.exact_tokens
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as second:
        store: Any = second._store
        store._loader.rules = replace(store._loader.rules, compute_seconds=lambda tokens: 1e-6)
        store._loader._token_bytes = 1.0
        store._loader.speeds["disk"].observe(seconds=10.0, nbytes=1)
        declined = second.prefill(_LONG)
        assert declined.reuse.cached_tokens == 0
        assert declined.reuse.declined_tokens == cached + 1  # the last token is stored, and computed for its logits
        (load,) = declined.reuse.declined
        assert (load.tier, load.tokens, load.compute_seconds) == ("disk", cached + 1, 1e-6)
        assert load.load_seconds > 1.0
        assert _same_bits(declined, cold)


class _OtherTier:
    """What a directory holds, handed out as a test wants it."""

    def __init__(self, tier: DiskTier, hand_out: Callable[[Blocks], Blocks]) -> None:
        self._tier, self._hand_out = tier, hand_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def load(self, keys: Any) -> Blocks:
        return self._hand_out(self._tier.load(keys))


def _slowly(blocks: Blocks) -> Blocks:
    for block in blocks:
        time.sleep(0.01)
        yield block


def _torn_after_two(blocks: Blocks) -> Blocks:
    yield next(blocks)
    yield next(blocks)
    raise OSError("torn")


def _of_another_shape(blocks: Blocks) -> Blocks:
    yield next(blocks)
    block = next(blocks)
    assert block is not None
    yield replace(block, tensors=tuple(tensor[:, :, :-1] for tensor in block.tensors))


def _of_another_text(blocks: Blocks) -> Blocks:
    first, second, third = next(blocks), next(blocks), next(blocks)
    assert second is not None
    assert third is not None
    yield first
    yield replace(third, key=second.key)


@pytest.mark.parametrize(
    ("hand_out", "chunks", "warns"),
    [(_slowly, None, False), (_torn_after_two, 2, True), (_of_another_shape, 1, False), (_of_another_text, 1, False)],
)
def test_a_tier_that_is_slow_fails_or_lies_changes_no_bit(
    hand_out: Any, chunks: int | None, warns: bool, tiny: Tiny, tmp_path: Path
) -> None:
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path, quality="exact") as first:
        cold = first.prefill(_LONG)
        cached = first.prefill(_LONG).reuse.exact_tokens
        ends = [chunk.end for chunk in first.session.prefiller.chunk(_LONG, ()).usable]  # type: ignore[union-attr]
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path, quality="exact") as second:
        second.prefill(text(77, 500))  # so that the workspace has rows of something else
        store: Any = second._store
        store._own.tiers = (_OtherTier(store._own.tiers[0], hand_out),)
        with pytest.warns(RuntimeWarning, match="disk tier: it failed") if warns else nullcontext():
            found = second.prefill(_LONG)
        assert found.reuse.exact_tokens == (ends[chunks - 1] if chunks else cached)
        assert _chain(found) == {"disk": found.reuse.exact_tokens}
        assert _same_bits(found, cold)
        assert store.stats().leased == 0


def test_what_was_placed_on_the_way_is_placed_again_if_another_block_is_held(tiny: Tiny, tmp_path: Path) -> None:
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as first:
        cold = first.prefill(_LONG)
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as second:
        guarded = second.session.prefiller.store  # type: ignore[union-attr]
        lease = guarded.lease

        def with_rubbish(chunks: Any, *, arrived: Any = None, **others: Any) -> Any:
            def spoilt(chunk: Any, block: KVBlock) -> None:
                arrived(chunk, replace(block, tensors=tuple(torch.full_like(t, 7.0) for t in block.tensors)))

            return lease(chunks, arrived=spoilt, **others)

        guarded.lease = with_rubbish  # type: ignore[method-assign]
        found = second.prefill(_LONG)
        assert found.reuse.exact_tokens > 0
        assert _same_bits(found, cold)


def test_a_block_that_cannot_be_placed_is_the_readers_trouble_and_not_the_stores(tiny: Tiny, tmp_path: Path) -> None:
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as first:
        first.prefill(_LONG)
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as second:
        codec: Any = second.session.prefiller.codec  # type: ignore[union-attr]

        def failing(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no room")

        codec.place = failing
        with pytest.raises(RuntimeError, match="no room"):
            second.prefill(_LONG)
        del codec.place
        assert (second._store.stats().leased, second.cache_stats()["store_errors"]) == (0, 0)
        assert second.prefill(_LONG).reuse.exact_tokens > 0


def test_prefetching_makes_the_request_find_all_in_memory(tiny: Tiny, tmp_path: Path) -> None:
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as first:
        cold = first.prefill(_LONG)
        assert first.prefetch(_LONG).result(timeout=30) == 0  # it is there
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path) as second:
        before = second.cache_stats()
        came = second.prefetch(_LONG).result(timeout=30)
        assert (second.cache_stats()["cache_hits"], second.cache_stats()["cache_misses"]) == (0, before["cache_misses"])
        found = second.prefill(_LONG)
        assert _chain(found) == {"memory": came - 1}  # the last token is stored, and computed for its logits
        assert _same_bits(found, cold)
    with engine_for(tiny("llama")) as without:
        assert without.prefetch(_LONG).result(timeout=0) == 0
    with pytest.raises(ConfigError, match="closed"):
        without.prefetch(_LONG)
