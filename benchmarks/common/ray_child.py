"""A fleet under Ray Serve in a process of its own, run by a Python that has Ray: one JSON line per order and answer.

python ray_child.py MODEL '{"router": ..., "replicas": 3, "port": ..., "engine": {...}, "runner": {...}}'
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_AFFINITY = "benchmarks.common.ray_routers.PrefixAffinity"
_ROUTERS: dict[str, dict[str, Any]] = {
    "round robin": {"request_router_class": "ray.serve.experimental.round_robin_router.RoundRobinRouter"},
    "power of two": {},  # Serve's default
    "prefix affinity": {"request_router_class": _AFFINITY},
    # Ray's default follows a prefix whatever the queues: here not to a queue that is longer by two requests or more.
    "balanced affinity": {"request_router_class": _AFFINITY, "request_router_kwargs": {"imbalanced_threshold": 1}},
}
_OBJECT_STORE_BYTES = 100 * 2**20


def router_of(name: str) -> Any:
    """Serve's settings for a router; None leaves it to kvboost."""
    from ray.serve.config import RequestRouterConfig

    return None if name == "content" else RequestRouterConfig(**_ROUTERS[name])


def processes() -> dict[str, dict[str, int]]:
    """The processes of the running replicas, by deployment."""
    from ray import serve

    details: Any = serve.context._get_global_client().get_serve_details()["applications"]
    return {
        name: {each["replica_id"]: each["pid"] for each in deployment["replicas"] if each["state"] == "RUNNING"}
        for application in details.values()
        for name, deployment in application["deployments"].items()
    }


def main() -> None:
    """Serve until the input ends."""
    model, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints is no answer
    import ray
    from ray import serve

    from kvboost.config import RunnerConfig
    from kvboost.integrations.ray import RayConfig, build_app
    from kvboost.serve import ServerConfig

    ray.init(
        address="local",
        num_cpus=settings["replicas"] + 1,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level="error",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": settings["port"]})
    app = build_app(
        model,
        engine=settings["engine"],
        server=ServerConfig(served_model_name="model", drain_seconds=5),
        runner=RunnerConfig(**settings.get("runner", {})),
        ray_config=RayConfig(replicas=settings["replicas"]),
        router=router_of(settings["router"]),
    )
    serve.run(app, name="kvboost")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = processes() if order["do"] == "processes" else None
        print(json.dumps(answer), file=answers, flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
