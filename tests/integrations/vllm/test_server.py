"""vLLM's HTTP server with the connector: scheduler and worker in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.servers import free_port
from benchmarks.common.vllm_engine import ENVIRONMENT
from tests.integrations.vllm.conftest import PYTHON

_START_S = 300
_TEXT = "The lighthouse of Brunn was built in 1871, long before the harbour had a power station. " * 20


@contextmanager
def _server(model: Path, place: Path) -> Iterator[str]:
    port = free_port()
    transfer = {
        "kv_connector": "KVBoostConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"disk_cache_dir": str(place)},
    }
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    command += ["--block-size", "32", "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            end = time.monotonic() + _START_S
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                    break
                except (urllib.error.URLError, OSError):
                    if process.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        raise AssertionError(f"the server did not start:\n{log.read()[-4000:]}") from None
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _ask(url: str) -> tuple[str, int]:
    body: dict[str, Any] = {"model": "m", "prompt": _TEXT, "max_tokens": 8, "temperature": 0}
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
