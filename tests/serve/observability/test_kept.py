from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.serve.observability.metrics import total_stats
from kvboost.store import DiskTier, MemoryStore

_SETTINGS: dict[str, Any] = {"chunk_size": 16, "chunking": "fixed", "quality": "exact"}


def test_a_store_that_was_given_is_counted_once(tiny: Callable[..., Any]) -> None:
    with KVBoost(tiny("llama"), store=MemoryStore(10**7), **_SETTINGS) as engine:
        for view in (engine, engine.for_tenant("other")):
            view.prefill(list(range(3, 70)))
        total, own = total_stats(engine), engine.cache_stats()
        assert total["hot_chunks"] == own["hot_chunks"] == 10
        assert total["bytes_by_tier"] == own["bytes_by_tier"]
        assert total["workspace_bytes"] == own["workspace_bytes"]
    with KVBoost(tiny("llama"), **_SETTINGS) as engine:
        for view in (engine, engine.for_tenant("other")):
            view.prefill(list(range(3, 70)))
        assert total_stats(engine)["hot_chunks"] == 10, "four and the end of the prompt of each tenant"


def test_what_tenants_have_in_a_tier_is_summed(tiny: Callable[..., Any], tmp_path: Path) -> None:
    with KVBoost(tiny("llama"), disk_cache_dir=tmp_path, **_SETTINGS) as engine:
        views = (engine, engine.for_tenant("other"))
        for view in views:
            view.prefill(list(range(3, 70)))
        engine.flush()
        each = [view.cache_stats()["bytes_by_tier"]["disk"] for view in views]
        assert min(each) > 0
        assert total_stats(engine)["bytes_by_tier"]["disk"] == sum(each)


def test_what_tiers_swallow_is_counted_once_for_all_tenants(tiny: Callable[..., Any], tmp_path: Path) -> None:
    with KVBoost(tiny("llama"), disk_cache_dir=tmp_path, **_SETTINGS) as engine:
        engine.for_tenant("other"), engine.for_tenant("third")
        tier = engine.parts.assembly.stores._tiers[0]
        with pytest.warns(RuntimeWarning, match="disk tier: it is full"):
            tier._backend.health.failed("it is full", "no space", remedy="make some")
        assert total_stats(engine)["store_errors"] == engine.cache_stats()["store_errors"] == 1
        assert engine.tier_states()["disk"].work.errors == 1


def test_what_tiers_raise_is_counted_for_whoever_asked_and_a_warning_once(
    tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KVBoost(tiny("llama"), disk_cache_dir=tmp_path, **_SETTINGS) as engine:
        monkeypatch.setattr(DiskTier, "contains", lambda tier, keys: 1 // 0)
        with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
            engine.prefill(list(range(3, 70)))
        seen = engine.tier_states()["disk"].work.errors
        engine.for_tenant("other").prefill(list(range(3, 70)))  # another warning would be an error
        assert total_stats(engine)["store_errors"] == engine.tier_states()["disk"].work.errors > seen > 0
        monkeypatch.undo()


def test_without_asking_the_tiers_nothing_is_read(
    tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KVBoost(tiny("llama"), disk_cache_dir=tmp_path, **_SETTINGS) as engine:
        engine.prefill(list(range(3, 70)))
        engine.flush()
        asked = total_stats(engine)
        monkeypatch.setattr(DiskTier, "_totals", lambda tier: 1 // 0)
        assert total_stats(engine, ask_tiers=False) == asked
        assert asked["bytes_by_tier"]["disk"] > 0
