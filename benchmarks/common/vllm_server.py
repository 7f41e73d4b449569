"""vLLM's HTTP server in a process of its own, run by a Python that has vLLM, with our connector or without."""

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

from benchmarks.common.report import BenchError
from benchmarks.common.servers import free_port
from benchmarks.common.vllm_engine import ENVIRONMENT

MODEL_NAME = "m"
_START_S = 300


@contextmanager
def vllm_server(python: Path, model: Path, *options: str, connector: dict[str, Any] | None) -> Iterator[str]:
    """Its address. ``connector`` are the settings of ours, or None for vLLM alone."""
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", MODEL_NAME, "--enforce-eager", "--block-size", "32"]
    command += ["--enable-prompt-tokens-details", "--shutdown-timeout", "30", *options]
    if connector is not None:
        transfer = {
            "kv_connector": "KVBoostConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": connector,
        }
        command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # it has an address that empties vLLM's own prefix cache
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            end = time.monotonic() + _START_S
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise BenchError(f"the server did not start:\n{log.read()[-4000:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _healthy(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
    except (urllib.error.URLError, OSError):
        return False
    return True
