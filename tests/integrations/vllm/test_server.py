"""vLLM's HTTP server with the connector: scheduler and worker in processes of their own."""

from __future__ import annotations

import json
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.common.vllm_server import MODEL_NAME, vllm_server
from tests.integrations.vllm.conftest import PYTHON

_TEXT = "The lighthouse of Brunn was built in 1871, long before the harbour had a power station. " * 20


def _server(model: Path, place: Path) -> AbstractContextManager[str]:
    options = ("--dtype", "float32", "--max-model-len", "1024")
    return vllm_server(PYTHON, model, *options, connector={"disk_cache_dir": str(place)})


def _ask(url: str) -> tuple[str, int]:
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": _TEXT, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0


def test_a_restarted_server_finds_its_text_on_disk(model: Path, tmp_path: Path) -> None:
    with _server(model, tmp_path / "kv") as url:
        text, cached = _ask(url)
        assert cached == 0
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
            metrics = response.read().decode()
        saved = [line for line in metrics.splitlines() if line.startswith("vllm:kvboost_saved_tokens_total")]
        assert saved, "the connector's counters are among vLLM's metrics"
        assert float(saved[0].rsplit(" ", 1)[1]) > 300
    with _server(model, tmp_path / "kv") as url:
        again, cached = _ask(url)
    assert again == text
    assert cached > 300
