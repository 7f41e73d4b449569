"""vLLM engines in processes of their own, each run by a Python that has vLLM: see ``vllm_child``."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.common.report import BenchError
from benchmarks.common.servers import redis_server

_ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(_ROOT / "src"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What vLLM's CPU build needs here, in one process."""


def vllm_python(venv: Path | None) -> Path:
    """The Python of an environment that has vLLM. Raises BenchError if there is none."""
    if venv is None:
        raise BenchError("this needs vLLM: give --vllm-venv FOLDER, an environment with vLLM and kvboost")
    python = venv.expanduser() / "bin" / "python"
    if not python.is_file():
        raise BenchError(f"{venv} has no bin/python; give --vllm-venv the folder of an environment with vLLM")
    return python


def random_prompt(seed: int, length: int) -> list[int]:
    """Tokens that no other seed has."""
    source = random.Random(seed)
    return [source.randrange(1000, 30000) for _ in range(length)]


@contextmanager
def lasting_tiers() -> Iterator[dict[str, dict[str, Any]]]:
    """The connector's settings for an empty disk and an empty Redis, by name."""
    with tempfile.TemporaryDirectory() as folder, redis_server() as redis:
        yield {"disk": {"disk_cache_dir": f"{folder}/kv"}, "Redis": {"remote_url": redis.url}}


class VLLMEngine:
    """One vLLM engine. A context manager: leaving it closes the engine, :meth:`kill` does not wait."""

    def __init__(
        self,
        python: Path,
        model: Path,
        *,
        connector: dict[str, Any] | None,
        seed: str = "",
        watched: bool = False,
        **engine: Any,
    ) -> None:
        """``connector`` are its settings, or a transfer config that names another one, or None for vLLM alone.

        ``seed`` names a fault to put into it. ``watched``: :meth:`generate` takes ``logits`` (a file to write them
        to) and ``forced`` (the tokens to say), for one prompt at a time.
        """
        settings = {"connector": connector, "engine": engine, "seed": seed, "watched": watched}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("vllm_child.py")), str(model), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        started = self._answer()
        self.block_size: int = started["block_size"]
        self.versions: dict[str, str] = started["versions"]
        """Of what matters in that environment."""

    def generate(self, *prompts: list[int], **order: Any) -> list[dict[str, Any]]:
        """Answers to prompts given together."""
        answer: list[dict[str, Any]] = self.ask(do="generate", prompts=prompts, **order)
        return answer

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.ask(do="forget")

    def counts(self) -> Counter[str]:
        """Steps, preemptions and the connector's counts since the start."""
        return Counter(self.ask(do="counts"))

    def ask(self, **order: Any) -> Any:
        """Give an order and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def log(self) -> str:
        """What the engine has printed so far."""
        self._log.seek(0)
        return self._log.read()

    def kill(self) -> None:
        """As a crash does."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the engine has ended:\n{self.log()[-4000:]}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        for stream in (self._process.stdout, self._log):
            if stream is not None:
                stream.close()
