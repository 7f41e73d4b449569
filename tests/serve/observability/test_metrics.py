"""What an operator sees: tiers, times and preemptions; and that looking costs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvboost import KVBoost
from kvboost.store import DiskTier
from tests.serve.conftest import ADMIN_KEY, KEY, Running

_ASKED = {"model": "tiny", "prompt": "what lies on the disk is found again " * 4, "max_tokens": 4, "temperature": 0}


def _samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def with_disk(
    start_server: Callable[..., Running],
    make_engine: Callable[..., KVBoost],
    tmp_path_factory: pytest.TempPathFactory,
) -> Running:
    """A server over a directory that an earlier process has filled."""
    folder = tmp_path_factory.mktemp("kv")
    with make_engine(disk_cache_dir=folder) as earlier:
        earlier.warm(_ASKED["prompt"])
        earlier.flush()
    return start_server(make_engine(disk_cache_dir=folder))


def test_every_tier_tells_how_it_does(with_disk: Running) -> None:
    with with_disk.http(None) as http:
        usage = http.post("/v1/completions", json=_ASKED).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0, "from the disk: the memory was empty"
        samples = _samples(http.get("/metrics").text)
        told = http.get("/ready").json()
        page = http.get("/v1/cache").json()
    assert samples["kvboost_runner_alive",] == 1
    assert samples["kvboost_runner_step_seconds",] < 5, "what ends the last step may still run"
    assert samples["kvboost_tier_available", "disk"] == 1
    assert samples["kvboost_tier_hits_total", "disk"] > 0
    assert samples["kvboost_tier_loads_total", "disk"] > 0
    assert samples["kvboost_tier_load_seconds_total", "disk"] > 0
    for name in ("misses", "loads_declined", "writes_dropped", "refused", "errors"):
        assert samples[f"kvboost_tier_{name}_total", "disk"] == 0
    assert told["status"] == "ready"
    assert told["tiers"] == page["tiers"]
    disk = told["tiers"]["disk"]
    assert disk["load_ms"] > 0
    assert {name: disk[name] for name in ("available", "errors", "writes_dropped", "loads_declined", "hit_rate")} == {
        "available": True,
        "errors": 0,
        "writes_dropped": 0,
        "loads_declined": 0,
        "hit_rate": 1.0,
    }


def test_a_directory_that_is_gone_is_seen_and_the_server_stays_ready(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost], tmp_path: Path
) -> None:
    """A file in its place stops root too."""
    folder = tmp_path / "kv"
    server = start_server(make_engine(disk_cache_dir=folder))
    with server.http(None) as http:
        assert _samples(http.get("/metrics").text)["kvboost_tier_available", "disk"] == 1
        folder.rename(tmp_path / "elsewhere")
        folder.touch()
        with pytest.warns(RuntimeWarning, match="the directory cannot be used"):
            server.engine.flush()
        assert http.post("/v1/completions", json=_ASKED).status_code == 200, "it answers without the tier"
        answer, samples = http.get("/ready"), _samples(http.get("/metrics").text)
        assert answer.status_code == 200
        assert answer.json()["tiers"]["disk"]["available"] is False
        assert answer.json()["tiers"]["disk"]["errors"] > 0
        assert samples["kvboost_tier_available", "disk"] == 0
        assert samples["kvboost_tier_errors_total", "disk"] == samples["kvboost_store_errors_total",] > 0
        folder.unlink()
        (tmp_path / "elsewhere").rename(folder)
        server.engine.flush()
        assert http.get("/ready").json()["tiers"]["disk"]["available"] is True, "it is back"


def test_no_scrape_or_page_asks_a_tier(with_disk: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    totals = DiskTier._totals

    def watched(tier: DiskTier) -> tuple[int, int]:
        asked.append(threading.current_thread().name)
        return totals(tier)

    monkeypatch.setattr(DiskTier, "_totals", watched)
    with with_disk.http(None) as http:
        for path in ("/metrics", "/v1/cache", "/ready", "/health", "/"):
            for _ in range(3):
                assert http.get(path).status_code == 200
        assert asked == []
        with_disk.service.kept.look_again()
        deadline = time.monotonic() + 10
        while not asked and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(asked) == {"kvboost-statistics"}
        assert http.get("/v1/cache").json()["cache"]["bytes_by_tier"]["disk"] > 0


def test_only_the_admin_sees_the_tiers(keyed: Running) -> None:
    for key in (None, KEY):
        with keyed.http(key) as http:
            assert http.get("/ready").json() == {"status": "ready"}
    with keyed.http(ADMIN_KEY) as http:
        assert http.get("/ready").json() == {"status": "ready", "tiers": {}}


def test_an_operator_sees_when_non_prefix_reuse_is_switched_off(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    server = start_server(make_engine(quality=0.05))
    names = [(f"kvboost_non_prefix_{name}",) for name in ("allowed", "checked", "differed")]
    with server.http(None) as http:
        samples = _samples(http.get("/metrics").text)
        assert [samples[name] for name in names] == [1, 0, 0]
        for differs in (False, True, True, True):  # the third stops it, and what was checked meanwhile does not count
            server.engine.session.prefiller.approx.guard.observe(differs)
        samples = _samples(http.get("/metrics").text)
        assert [samples[name] for name in names] == [0, 3, 2]


def test_waiting_and_the_time_of_a_token_are_measured(keyed: Running) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": "a b c",
        "max_tokens": 5,
        "temperature": 0,
        "logit_bias": {"257": -100},
    }
    with keyed.http(ADMIN_KEY) as admin, keyed.http() as http:
        before = _samples(admin.get("/metrics").text)
        assert http.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 5
        after = _samples(admin.get("/metrics").text)
        record = admin.get("/v1/cache").json()["requests"][-1]
    for name in ("kvboost_queue_seconds", "kvboost_output_token_seconds"):
        assert after[f"{name}_count",] - before[f"{name}_count",] == 1
        assert after[f"{name}_sum",] > before[f"{name}_sum",]
    assert after["kvboost_jobs_preempted_total",] == 0
    assert 0 < record["queue_ms"] <= record["ttft_ms"] < record["total_ms"]
    assert record["ttft_ms"] + 4 * record["token_ms"] == pytest.approx(record["total_ms"], rel=0.5)
