from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvboost import KVBoost
from kvboost.serve.observability.totals import total_stats
from kvboost.store import MemoryStore


def test_a_store_that_was_given_is_counted_once(tiny: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {"chunk_size": 16, "chunking": "fixed", "quality": "exact"}
    with KVBoost(tiny("llama"), store=MemoryStore(10**7), **settings) as engine:
        for view in (engine, engine.for_tenant("other")):
            view.prefill(list(range(3, 70)))
        total, own = total_stats(engine), engine.cache_stats()
        assert total["hot_chunks"] == own["hot_chunks"] == 10
        assert total["bytes_by_tier"] == own["bytes_by_tier"]
        assert total["workspace_bytes"] == own["workspace_bytes"]
    with KVBoost(tiny("llama"), **settings) as engine:
        for view in (engine, engine.for_tenant("other")):
            view.prefill(list(range(3, 70)))
        assert total_stats(engine)["hot_chunks"] == 10, "four and the end of the prompt of each tenant"
