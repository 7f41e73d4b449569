"""A fleet under Ray Serve, run by a Python that has Ray (see ``ray_child``), and what is asked of it over HTTP.

Used by the benchmarks of real fleets. Invariant: what they count comes from answers, from the replicas' metrics, or
from Redis itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.report import BenchError
from benchmarks.common.servers import free_port

_ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'src'}",
    "PYTHONWARNINGS": "ignore",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
_END_S = 120.0


def ray_python(venv: Path | None) -> Path:
    """A Python that has Ray: of this environment, or of the one that ``--ray-venv`` names. Raises BenchError."""
    if venv is not None:
        python = venv.expanduser() / "bin" / "python"
        if not python.is_file():
            raise BenchError(f"there is no Python in {venv}; give --ray-venv an environment with kvboost[ray]")
        return python
    if find_spec("ray") is None:
        raise BenchError('this needs Ray: give --ray-venv FOLDER, an environment with "kvboost[ray]"')
    return Path(sys.executable)


class RayFleet:
    """Replicas, a front and Serve's proxy. A context manager; entering waits until they answer."""

    def __init__(
        self,
        python: Path,
        model: Path,
        *,
        router: str,
        replicas: int,
        engine: dict[str, Any],
        runner: dict[str, Any] | None = None,
    ) -> None:
        """``router`` is ``"content"`` for ours, or one of those that ``ray_child`` knows."""
        self.port = free_port()
        settings = {"router": router, "replicas": replicas, "port": self.port, "engine": engine, "runner": runner or {}}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.common.ray_child", str(model), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **ENVIRONMENT},
        )

    @property
    def url(self) -> str:
        """Of Serve's proxy."""
        return f"http://127.0.0.1:{self.port}"

    def complete(self, client: httpx.Client, prompt: list[int], *, new: int = 1, **more: Any) -> dict[str, Any]:
        """What /v1/completions answers. Raises httpx.HTTPError, also for a status that is no success."""
        asked = {"model": "model", "prompt": prompt, "max_tokens": new, "temperature": 0, **more}
        answer = client.post(self.url + "/v1/completions", json=asked)
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()
        return told

    def clear(self) -> None:
        """Empty every replica and the shared tier."""
        httpx.post(self.url + "/v1/cache/clear", timeout=60).raise_for_status()

    def metric(self, name: str, **labels: str) -> dict[str, float]:
        """A metric of each replica, summed over all labels that are not given."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(self.url + "/metrics", timeout=60).text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    replica = sample.labels["replica"]
                    found[replica] = found.get(replica, 0.0) + sample.value
        return found

    def processes(self) -> dict[str, dict[str, int]]:
        """The processes that run now, of ``front`` and ``replica``, by their names."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": "processes"}) + "\n")
        self._process.stdin.flush()
        found: dict[str, dict[str, int]] = self._answer()
        return found

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise BenchError(f"the fleet has ended: {self._log.read()[-1500:]}")
        return json.loads(line)

    def __enter__(self) -> Self:
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drain it and wait for its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
