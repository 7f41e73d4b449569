"""One engine for many tenants: what they share, what none sees of another, in memory and in every tier."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.faults import Fault, FaultyProxy
from benchmarks.common.servers import RedisServer
from kvboost import ConfigError, KVBoost
from kvboost.errors import StoreError
from kvboost.store import MemoryStore
from kvboost.store.record.format import inspect
from kvboost.store.record.header import MAGIC
from kvboost.types import context_mark
from tests.approx.test_find import HEAD, ONE, QUESTION, THREE, TWO, engine_for, read, text, warm
from tests.engine.test_tiers import _same_bits, patient
from tests.store.record.test_protection import KEY, key_file

pytestmark = pytest.mark.usefixtures("prices_as_guessed")

Tiny = Callable[..., Any]
Tier = dict[str, Any]
_LONG = text(11, 400)
_TIERS = ["memory", "disk", "redis"]


@pytest.fixture(params=_TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    """The settings of an engine with this tier."""
    if request.param == "memory":
        return {}
    if request.param == "disk":
        return {"disk_cache_dir": tmp_path / "cache"}
    return patient(request.getfixturevalue("redis_at").url)


def found(engine: KVBoost, prompt: list[int]) -> int:
    """How much of a prompt is reused."""
    return engine.prefill(prompt).reuse.cached_tokens


def test_nothing_of_one_tenant_is_found_by_another(tier: Tier, tiny: Tiny) -> None:
    with engine_for(tiny("llama"), **tier) as engine:
        one, other = engine.for_tenant("one"), engine.for_tenant("other")
        cold = one.prefill(_LONG)
        engine.flush()
        for stranger in (other, engine):
            result = stranger.prefill(_LONG)
            assert result.reuse.cached_tokens == 0
            assert _same_bits(result, cold)
        assert one.prefill(_LONG).reuse.cached_tokens > 0.9 * len(_LONG)
    if tier:  # what lies outside the process is still the tenant's, and nobody else's
        with engine_for(tiny("llama"), **tier) as engine:
            assert found(engine.for_tenant("a third"), _LONG) == 0
            again = engine.for_tenant("one")
            assert found(again, _LONG) > 0.9 * len(_LONG)
        with engine_for(tiny("llama"), **tier, tenant="one") as engine:
            assert found(engine, _LONG) > 0.9 * len(_LONG), "a view is not the tenant that tenant= names"


def test_a_purge_removes_all_of_a_tenant_and_nothing_else(tier: Tier, tiny: Tiny) -> None:
    with engine_for(tiny("llama"), **tier) as engine, engine_for(tiny("qwen2"), **tier) as model:
        one, other = engine.for_tenant("one"), engine.for_tenant("other")
        for view in (one, other, model.for_tenant("one")):
            view.prefill(_LONG)
        engine.flush()
        model.flush()
        engine.purge_tenant("one")
        assert one._store.stats("one").chunks == 0
        assert sum(below.chunks for below in one._store.stats("one").below) == 0
        assert one.prefill(_LONG).reuse.cached_tokens == 0
        assert other.prefill(_LONG).reuse.cached_tokens > 0
        if tier:  # of whatever model
            below = model.for_tenant("one")._store.stats("one").below
            assert sum(each.chunks for each in below) == 0
    if tier:
        with engine_for(tiny("llama"), **tier) as engine:
            assert found(engine.for_tenant("other"), _LONG) > 0
        with engine_for(tiny("llama"), **tier) as engine:
            engine.purge_tenant("other")  # nobody asked for it here before
            assert "other" not in engine._views
            assert found(engine.for_tenant("other"), _LONG) == 0


def test_a_purge_that_cannot_be_done_says_so(tiny: Tiny, redis_at: RedisServer) -> None:
    with (
        FaultyProxy(redis_at.port) as proxy,
        engine_for(tiny("llama"), **patient(f"redis://127.0.0.1:{proxy.port}/0")) as engine,
    ):
        engine.for_tenant("one").prefill(_LONG)
        engine.flush()
        proxy.fault = Fault.REFUSED
        with pytest.warns(RuntimeWarning), pytest.raises(StoreError, match="redis; purge it again"):
            engine.purge_tenant("one")
        with pytest.raises(StoreError, match="redis; purge it again"):
            engine.purge_tenant("one")


def test_a_tenant_stays_within_its_quota_on_this_machine(tiny: Tiny, tmp_path: Path) -> None:
    with engine_for(tiny("llama"), tenant_bytes="200kB", disk_cache_dir=tmp_path / "cache") as engine:
        quiet, loud = engine.for_tenant("quiet"), engine.for_tenant("loud")
        quiet.prefill(_LONG)
        for seed in range(20):
            loud.prefill(text(100 + seed, 400))
            assert loud._store.stats("loud").bytes <= 200_000
        engine.flush()
        stats = loud._store.stats("loud")
        assert stats.evictions > 0
        assert [below.tier for below in stats.below] == ["disk"]
        for below in stats.below:
            assert 100_000 < below.bytes <= 200_000
        assert quiet.prefill(_LONG).reuse.cached_tokens > 0, "the quiet tenant paid for the loud one"


def test_a_flood_of_one_tenant_leaves_the_others_their_cache(tiny: Tiny) -> None:
    with engine_for(tiny("llama"), cache_bytes="600kB") as engine:
        quiet, loud = engine.for_tenant("quiet"), engine.for_tenant("loud")
        cold = found(quiet, _LONG), found(quiet, _LONG)
        assert cold[1] > 0.9 * len(_LONG) > cold[0] == 0
        for seed in range(30):
            loud.prefill(text(100 + seed, 400))
        stats = loud._store.stats("loud")
        assert stats.evictions > 0, "it was no flood"
        assert found(quiet, _LONG) == cold[1], "another tenant's unique prompts took its place"
        assert stats.bytes > 300_000, "what the others leave free is for whoever needs it"


@pytest.mark.parametrize("protection", ["mac", "encrypt"])
def test_protected_records_need_the_key(protection: str, tiny: Tiny, tmp_path: Path) -> None:
    settings = {"disk_cache_dir": tmp_path / "cache", "record_protection": protection}
    key = key_file(tmp_path, KEY)
    with engine_for(tiny("llama"), **settings, record_key_file=key) as engine:
        cold = engine.for_tenant("one").prefill(_LONG)
    records = list((tmp_path / "cache").rglob("*.kv"))
    assert records
    for record in records:
        header = inspect(record.read_bytes())
        assert header.keyed
        assert header.encrypted == (protection == "encrypt")
    with engine_for(tiny("llama"), **settings, record_key_file=key) as engine:
        again = engine.for_tenant("one").prefill(_LONG)
        assert again.reuse.cached_tokens > 0.9 * len(_LONG)
        assert _same_bits(again, cold)
    (tmp_path / "other").mkdir()
    other = key_file(tmp_path / "other", bytes(32))
    with engine_for(tiny("llama"), **settings, record_key_file=other) as engine:
        assert engine.for_tenant("one").prefill(_LONG).reuse.cached_tokens == 0
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path / "cache") as engine:
        assert engine.for_tenant("one").prefill(_LONG).reuse.cached_tokens == 0


def _names_of(engine: KVBoost, prompt: list[int], roots: Iterable[bytes] = ()) -> set[bytes]:
    """What an attacker who knows the model, the settings and the prompt can compute, from these roots as well."""
    assert engine.session is not None
    keys = engine.session.prefiller.keys
    own = {keys.snapshot().root, keys.namespace()}
    names = set(own)
    for root in own.union(roots):
        chunks, tail = keys.chunks_and_tail(root, prompt, [])
        for chunk in [*chunks, *([tail] if tail is not None else [])]:
            names |= {chunk.prefix_key, chunk.content_key, context_mark(chunk.content_key)}
    return names


def _found_in(seen: Iterable[bytes], names: set[bytes]) -> int:
    """How many of these names are somewhere in what was seen, as they are or in hex."""
    everything = b"\0".join(seen)
    return sum(name in everything or name.hex().encode() in everything for name in names)


def _readable(settings: Tier) -> list[bytes]:
    """Every name and every byte that lies in a directory or on a server."""
    if "disk_cache_dir" in settings:
        folder: Path = settings["disk_cache_dir"]
        files = [path for path in folder.rglob("*") if path.is_file()]
        return [str(path.relative_to(folder)).replace("/", "").encode() for path in files] + [
            path.read_bytes() for path in files
        ]
    import redis

    with redis.Redis.from_url(settings["remote_url"]) as client:
        names: list[bytes] = client.keys()
        kinds = {name: client.type(name) for name in names}
        records = [client.get(name) for name in names if kinds[name] == b"string"]
        members = [client.zrange(name, 0, -1) for name in names if kinds[name] == b"zset"]
    assert set(kinds.values()) <= {b"string", b"zset"}
    return [*names, *records, *(member for each in members for member in each)]


@pytest.mark.parametrize("tier", ["disk", "redis"], indirect=True)
@pytest.mark.parametrize("protection", ["none", "mac", "encrypt"])
def test_no_guess_of_a_text_can_be_confirmed_without_the_key(
    protection: str, tier: Tier, tiny: Tiny, tmp_path: Path
) -> None:
    settings: Tier = {} if protection == "none" else {"record_key_file": key_file(tmp_path, KEY)}
    with engine_for(tiny("llama"), **tier, record_protection=protection, **settings) as engine:
        engine.prefill(_LONG)
        engine.flush()
        seen = _readable(tier)
    headers = [inspect(record) for record in seen if record.startswith(MAGIC)]
    assert headers
    with engine_for(tiny("llama")) as attacker:
        names = _names_of(attacker, _LONG, {header.namespace.root for header in headers})
    assert len(names) > 20
    # Without protection they are all there, so that the search is known to find what is.
    assert _found_in(seen, names) == 0 if protection != "none" else _found_in(seen, names) > 20


def test_a_bad_key_costs_no_model_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KVBoost.from_pretrained("nowhere", record_protection="mac", record_key_file=tmp_path / "none")


# Views


def test_there_is_one_view_for_each_tenant_until_it_is_closed(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"))
    one = engine.for_tenant("one")
    assert engine.for_tenant("one") is one
    assert one.for_tenant("one") is one
    assert one.for_tenant("") is engine.for_tenant("") is engine
    assert (one.config.tenant, one.model) == ("one", engine.model)
    one.prefill(_LONG)
    one.close()
    one.close()
    with pytest.raises(ConfigError, match="was closed"):
        one.prefill(_LONG)
    assert engine._store.stats().bytes == 0, "a closed view keeps memory"  # type: ignore[attr-defined]
    assert engine.prefill(_LONG).reuse.cached_tokens == 0
    assert engine.prefill(_LONG).reuse.cached_tokens > 0, "closing a view hurt the engine"
    new = engine.for_tenant("one")
    assert new is not one
    assert new.prefill(_LONG).reuse.cached_tokens == 0
    engine.close()
    for closed in (engine, new):
        with pytest.raises(ConfigError, match="was closed"):
            closed.prefill(_LONG)
    with pytest.raises(ConfigError, match="was closed"):
        engine.for_tenant("one")


def test_a_view_is_cheap(tiny: Tiny, tmp_path: Path, redis_at: RedisServer) -> None:
    with engine_for(tiny("llama"), disk_cache_dir=tmp_path / "cache", **patient(redis_at.url)) as engine:
        files = len(os.listdir("/proc/self/fd"))
        began = time.process_time()
        for number in range(100):
            engine.for_tenant(f"tenant {number}")
        assert time.process_time() - began < 3.0
        assert len(os.listdir("/proc/self/fd")) <= files + 2, "a view opens connections of its own"


def test_the_memory_of_all_tenants_is_one_budget(tiny: Tiny) -> None:
    with engine_for(tiny("llama"), cache_bytes="300kB") as engine:
        for number in range(12):
            engine.for_tenant(f"tenant {number % 4}").prefill(text(number, 300))
            assert engine._store.stats().bytes <= 300_000  # type: ignore[attr-defined]
        assert engine.for_tenant("tenant 3").cache_stats()["hot_chunks"] > 0


def test_a_workspace_is_never_another_tenants(tiny: Tiny) -> None:
    with engine_for(tiny("llama")) as engine:
        one, other = engine.for_tenant("one"), engine.for_tenant("other")
        one.generate(_LONG, max_new_tokens=1)
        pools = [view.session.prefiller.pool for view in (one, other)]  # type: ignore[union-attr]
        (kept,) = [idle.cache for idle in pools[0]._shelf.idle if idle.owner is pools[0]]
        mine = other.prefill(text(3, 100)).cache  # the caller's own: what else lies in it, the caller can read
        assert mine is not kept
        assert pools[1].take(tokens=10, chain=())[0] is not kept
        assert pools[0].take(tokens=10, chain=())[0] is kept
        assert pools[0].idle_bytes == pools[1].idle_bytes


def test_clearing_a_view_leaves_the_others(tier: Tier, tiny: Tiny) -> None:
    with engine_for(tiny("llama"), **tier) as engine:
        one, other = engine.for_tenant("one"), engine.for_tenant("other")
        for view in (engine, one, other):
            view.prefill(_LONG)
        engine.flush()
        one.clear()
        assert one.prefill(_LONG).reuse.cached_tokens == 0
        for view in (engine, other):
            assert view.prefill(_LONG).reuse.cached_tokens > 0


def test_moved_text_stays_with_its_tenant(tiny: Tiny) -> None:
    with engine_for(tiny("llama"), quality="high", recompute_ratio=0.0, force_approx=True) as engine:
        one, other = engine.for_tenant("one"), engine.for_tenant("other")
        warm(one, HEAD, ONE, TWO, THREE)
        assert read(other, HEAD, THREE, ONE, TWO, QUESTION).reuse.moved_tokens == 0
        assert read(one, HEAD, THREE, ONE, TWO, QUESTION).reuse.moved_tokens > 0
        assert other.cache_stats()["approximate_hits"] == 0 < one.cache_stats()["approximate_hits"]


def test_shadow_checks_read_with_the_tenants_own_reader(tiny: Tiny) -> None:
    settings = {"recompute_ratio": 1.0, "force_approx": True, "shadow_share": 1.0, "quality": 0.05}
    with engine_for(tiny("llama"), **settings) as engine:
        one = engine.for_tenant("one")
        warm(one, HEAD, ONE, TWO, THREE)
        tokens = [*HEAD, *THREE, *ONE, *TWO, *QUESTION]
        ends = [len(HEAD), len(HEAD + THREE), len(HEAD + THREE + ONE), len(HEAD + THREE + ONE + TWO)]
        assert one.generate(tokens, boundaries=ends, max_new_tokens=2, temperature=0).reuse.moved_tokens > 0
        assert engine.parts.shadow is not None
        engine.parts.shadow.wait()
        assert one.cache_stats()["non_prefix_reuse"]["checked"] == 1
        one.close()  # the checks go on for the others
        assert not engine.parts.shadow._closed


def test_a_store_that_was_given_is_shared_by_name_only(tiny: Tiny) -> None:
    store = MemoryStore(10**8)
    with engine_for(tiny("llama"), store=store) as engine:
        one, other = engine.for_tenant("one"), engine.for_tenant("other")
        one.prefill(_LONG)
        assert other.prefill(_LONG).reuse.cached_tokens == 0
        assert one.prefill(_LONG).reuse.cached_tokens > 0
        with pytest.raises(ConfigError, match="clear it there"):
            one.clear()
        with pytest.raises(ConfigError, match="remove them there"):
            engine.purge_tenant("one")
        one.close()
        assert other.prefill(_LONG).reuse.cached_tokens > 0
    with pytest.raises(ConfigError, match="tenant_bytes"):
        engine_for(tiny("llama"), store=store, tenant_bytes=1)


def test_a_tenant_is_a_text(tiny: Tiny) -> None:
    with engine_for(tiny("llama")) as engine, pytest.raises(ConfigError, match="tenant=3"):
        engine.for_tenant(3)  # type: ignore[arg-type]


# Processes


def digest(result: Any) -> str:
    return hashlib.sha256(result.logits.numpy().tobytes()).hexdigest()


_READER = """
import json, sys
from tests.approx.test_find import engine_for, text
from tests.engine.test_tenants import digest, found
from kvboost.core.prefill import Prefiller
from tests.helpers.models import tiny_model
Prefiller._observe = lambda self, reading: None  # as in the tests: what loading costs must not decide
engines = {}
for line in sys.stdin:
    settings, tenant, seed = json.loads(line)
    name = repr(settings)
    if name not in engines:
        engines[name] = engine_for(tiny_model("llama"), **settings)
    view = engines[name].for_tenant(tenant)
    reused = found(view, text(seed, 400))
    logits = digest(view.prefill(text(seed, 400)))
    view.flush()
    print(json.dumps([reused, logits]), flush=True)
for engine in engines.values():
    engine.close()
"""
Ask = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Has another process read a text for a tenant: how much it reused, and what came out."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", _READER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    said, heard = process.stdin, process.stdout

    def ask(where: dict[str, Any], tenant: str, seed: int) -> tuple[int, str]:
        said.write(json.dumps([where, tenant, seed]) + "\n")
        said.flush()
        reused, logits = json.loads(heard.readline())
        return reused, logits

    yield ask
    said.close()
    assert process.wait(60) == 0
    heard.close()


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_two_processes_share_a_tenants_text_and_keep_tenants_apart(
    kind: str, tiny: Tiny, tmp_path: Path, request: pytest.FixtureRequest, ask: Ask
) -> None:
    where: dict[str, Any] = (
        {"disk_cache_dir": str(tmp_path / "cache")}
        if kind == "disk"
        else patient(request.getfixturevalue("redis_at").url)
    )
    with engine_for(tiny("llama"), **where) as engine:
        one = engine.for_tenant("one")
        read_here = one.prefill(_LONG)
        engine.flush()
        assert ask(where, "other", 11)[0] == 0
        reused, logits = ask(where, "one", 11)
        assert reused > 0.9 * len(_LONG)
        assert logits == digest(read_here)
        reused, logits = ask(where, "one", 12)  # read there first
        assert reused == 0
        assert found(one, text(12, 400)) > 0.9 * 400
        assert logits == digest(one.prefill(text(12, 400)))
        assert found(engine.for_tenant("a third"), text(12, 400)) == 0
        engine.purge_tenant("one")
        assert found(one, _LONG) == 0
        assert found(engine.for_tenant("other"), _LONG) > 0, "the other tenant is gone too"


def test_closing_one_tenant_keeps_no_other_waiting(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVBoost(tiny("llama"), chunk_size=16) as engine:
        closing, go_on = threading.Event(), threading.Event()
        right = MemoryStore.close

        def slow(store: MemoryStore, tenant: str | None = None) -> None:
            if tenant == "slow":
                closing.set()
                assert go_on.wait(30)
            right(store, tenant)

        monkeypatch.setattr(MemoryStore, "close", slow)
        old = engine.for_tenant("slow")
        with ThreadPoolExecutor(2) as pool:
            closed = pool.submit(old.close)
            assert closing.wait(30)
            assert engine.for_tenant("other").config.tenant == "other"
            again = pool.submit(engine.for_tenant, "slow")
            time.sleep(0.05)
            assert not again.done(), "it waits for its own"
            go_on.set()
            closed.result(30)
            assert again.result(30) is not old


def test_what_a_closed_view_clears_and_counts_is_nobody_elses(tiny: Tiny) -> None:
    with KVBoost(tiny("llama"), chunk_size=16) as engine:
        view = engine.for_tenant("one")
        for one in (engine, view):
            one.warm(_LONG)
        held = engine.cache_stats()["hot_chunks"]
        view.close()
        view.clear()
        assert engine.cache_stats()["hot_chunks"] == held > 0
        assert view.cache_stats()["hot_chunks"] == 0
