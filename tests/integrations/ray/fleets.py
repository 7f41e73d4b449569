"""A fleet under Ray Serve in this process's Ray, and what tests ask of it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.servers import free_port
from kvboost.serve import ServerConfig


@dataclass(frozen=True)
class Fleet:
    """Where it answers."""

    port: int

    @property
    def url(self) -> str:
        """Of its front."""
        return f"http://127.0.0.1:{self.port}"

    def complete(self, prompt: str | list[int], **options: Any) -> httpx.Response:
        """POST /v1/completions."""
        asked = {"model": "model", "prompt": prompt, "max_tokens": 4, "temperature": 0, **options}
        return httpx.post(self.url + "/v1/completions", json=asked, timeout=120)

    def metric(self, name: str) -> dict[str, float]:
        """A metric of each replica, summed over its other labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(self.url + "/metrics", timeout=60).text):
            for sample in family.samples:
                if sample.name == name:
                    replica = sample.labels["replica"]
                    found[replica] = found.get(replica, 0.0) + sample.value
        return found


def replica_pids() -> dict[str, int]:
    """The processes of the replicas that Serve runs now."""
    from ray import serve

    status = serve.status().applications
    details: Any = serve.context._get_global_client().get_serve_details()["applications"]
    assert status
    return {
        replica["replica_id"]: replica["pid"]
        for application in details.values()
        for name, deployment in application["deployments"].items()
        for replica in deployment["replicas"]
        if name == "replica" and replica["state"] == "RUNNING"
    }


def kill(pid: int) -> None:
    """kill -9."""
    os.kill(pid, signal.SIGKILL)


def deploy(model: Path, *, engine: Mapping[str, Any] | None = None, **settings: Any) -> None:
    """Serve the model under the fleet's name; replicas of before are replaced one by one."""
    from ray import serve

    from kvboost.integrations.ray import RayConfig, build_app

    app = build_app(
        str(model),
        engine=engine,
        server=ServerConfig(served_model_name="model", drain_seconds=20),
        ray_config=RayConfig(**{"replicas": 2, "replica_cpus": 0.5, **settings}),
    )
    serve.run(app, name="kvboost")


@contextmanager
def fleet(model: Path, *, engine: Mapping[str, Any] | None = None, **settings: Any) -> Iterator[Fleet]:
    """Serve the model for one ``with`` block, drained at its end."""
    from ray import serve

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        deploy(model, engine=engine, **settings)
        yield Fleet(port)
    finally:
        serve.shutdown()


def text(seed: int, words: int = 150) -> str:
    """A document of its own."""
    source = random.Random(seed)
    return " ".join("".join(source.choices("abcdefghijklmnop", k=source.randint(2, 7))) for _ in range(words))
