"""A real Prometheus scrapes a real server: every query of the dashboard and every alert can be evaluated.

Needs Debian's ``prometheus``, which brings promtool; skipped without.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from benchmarks.common.servers import free_port
from tests.helpers.serving import kvboost_serve, tiny_folder

_DEPLOY = Path(__file__).parents[2] / "deploy"
_START_S = 60.0
_IDLE = ("moved", "declined", "dropped", "preempted", "errors", "evictions", "load_seconds")
"""What a healthy server with one reader does not do: such queries may have no samples, or 0 / 0."""

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None, reason="needs prometheus and promtool"
)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that has scraped a busy server a few times."""
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(_DEPLOY / "prometheus" / "alerts.yml", folder)
    with kvboost_serve(tiny_folder(folder / "model"), ["--disk-cache-dir", str(folder / "kv")]) as server:
        config = yaml.safe_load((_DEPLOY / "prometheus" / "prometheus.yml").read_text())
        (scrape,) = config["scrape_configs"]
        del scrape["authorization"]  # this server has no keys
        scrape["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        subprocess.run(["promtool", "check", "config", str(file)], check=True, capture_output=True)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _ask_until_scraped(server.url, url)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _ask_until_scraped(server: str, url: str) -> None:
    end = time.monotonic() + _START_S
    body = {"model": "model", "prompt": "a b c d e f " * 20, "max_tokens": 3}
    while time.monotonic() < end:
        httpx.post(f"{server}/v1/completions", json=body, timeout=60).raise_for_status()
        time.sleep(0.5)
        try:
            scraped = _query(url, "count_over_time(kvboost_jobs_running[1m])")
        except httpx.TransportError:
            continue  # not up yet
        if scraped and float(scraped[0]["value"][1]) >= 5:
            return
    raise AssertionError("Prometheus has not scraped the server five times in a minute")


def _query(url: str, expression: str) -> list[dict[str, list[str]]]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=30).json()
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    result: list[dict[str, list[str]]] = answer["data"]["result"]
    return result


def test_every_panel_has_samples(prometheus: str) -> None:
    panels = json.loads((_DEPLOY / "grafana" / "dashboards" / "kvboost.json").read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            found = _query(prometheus, target["expr"].replace("$__rate_interval", "10s"))
            if not any(word in target["expr"] for word in _IDLE):
                assert found, f"{panel['title']}: no samples for {target['expr']}"


def test_every_alert_is_evaluated_and_none_fires(prometheus: str) -> None:
    groups = httpx.get(f"{prometheus}/api/v1/rules", timeout=30).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 8
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


def test_a_wrong_query_is_seen(prometheus: str) -> None:
    with pytest.raises(AssertionError):
        _query(prometheus, "sum by (tier (kvboost_store_bytes)")
    assert _query(prometheus, "kvboost_no_such_name") == []
