"""The Ray Serve application: fronts that take requests, replicas that answer them.

Used by ``kvboost serve --ray``, and by whoever deploys ``build_app(...)`` with Serve's own tools. Invariant: a replica
has time to finish what it answers and to write what waits, before Serve ends it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from kvboost.config import RunnerConfig
from kvboost.errors import ConfigError
from kvboost.integrations.ray.config import RayConfig, connect, last_line
from kvboost.integrations.ray.front import Front
from kvboost.integrations.ray.replica import Replica
from kvboost.serve.config import ServerConfig
from kvboost.serve.security.limits import Limits

NAME = "kvboost"
"""Of the application, unless its user gives another."""
_STATS_S = 2.0  # between two times that a replica says what it holds
_FLUSH_S = 30.0  # to write what waits for the tiers, after the last request


def build_app(
    model: str,
    *,
    engine: Mapping[str, Any] | None = None,
    server: ServerConfig | None = None,
    runner: RunnerConfig | None = None,
    limits: Limits | None = None,
    ray_config: RayConfig | None = None,
    router: RequestRouterConfig | None = None,
) -> serve.Application:
    """The application for ``serve.run`` or a Serve config file.

    Args:
        model: Folder or hub name; every node must reach it.
        engine: Keyword arguments of ``KVBoost.from_pretrained``.
        server: As for ``kvboost serve``. ``host``, ``port`` and the TLS files are Serve's own HTTP options here.
        runner: How a replica runs its requests.
        limits: What one client and one request may take, in each replica.
        ray_config: How many replicas there are, and what each reserves.
        router: Another of Serve's request routers in place of ours, as measurements have it.
    """
    server, runner, limits = server or ServerConfig(), runner or RunnerConfig(), limits or Limits()
    fleet = ray_config or RayConfig()
    if server.served_model_name is None:
        server = replace(server, served_model_name=os.path.basename(os.path.abspath(model)))
    scaling: dict[str, Any] = {"num_replicas": fleet.replicas}
    if fleet.max_replicas is not None:
        bounds = {"min_replicas": fleet.replicas, "max_replicas": fleet.max_replicas}
        scaling = {"autoscaling_config": {**bounds, "target_ongoing_requests": fleet.target_requests}}
    replicas = serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=limits.max_streams,
        graceful_shutdown_timeout_s=server.drain_seconds + _FLUSH_S,
        ray_actor_options={"num_cpus": fleet.replica_cpus, "num_gpus": fleet.replica_gpus},
        request_router_config=router or _router_config(model, server),
        **scaling,
    )
    fronts = serve.deployment(
        serve.ingress()(Front),
        name="front",
        num_replicas=fleet.fronts,
        max_ongoing_requests=limits.max_connections,
        graceful_shutdown_timeout_s=server.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    )
    bound = replicas.bind(model, engine=dict(engine or {}), server=server, runner=runner, limits=limits)
    return fronts.bind(bound, limits=limits, root_path=server.root_path)


def from_args(args: Mapping[str, Any]) -> serve.Application:
    """What a Serve config file names as ``import_path``: :func:`build_app` with tables in place of dataclasses."""
    made = {"server": ServerConfig, "runner": RunnerConfig, "limits": Limits, "ray": RayConfig}
    unknown = args.keys() - made.keys() - {"model", "engine"}
    if unknown or "model" not in args:
        known = ", ".join(["model", "engine", *made])
        raise ConfigError(f"args has {sorted(args)}; give model, and of the others what you need: {known}")
    given = {name: make(**_listed(args.get(name) or {})) for name, make in made.items()}
    return build_app(
        str(args["model"]),
        engine=args.get("engine"),
        server=given["server"],
        runner=given["runner"],
        limits=given["limits"],
        ray_config=given["ray"],
    )


def _listed(table: Mapping[str, Any]) -> dict[str, Any]:
    """A config file has lists where the settings have tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def _router_config(model: str, server: ServerConfig) -> RequestRouterConfig:
    files = (server.api_key_file, server.admin_key_file, server.secret_file)
    return RequestRouterConfig(
        request_router_class="kvboost.integrations.ray.router.ContentRouter",
        request_router_kwargs={
            "model": os.path.expanduser(model),
            "model_name": server.served_model_name,
            "key_files": [str(file) if file is not None else None for file in files],
        },
        request_routing_stats_period_s=_STATS_S,
    )


def run_app(
    app: serve.Application, *, server: ServerConfig, ray_config: RayConfig, ready: Callable[[str, int], None]
) -> None:
    """Run the application until SIGTERM or SIGINT, then drain it. Where: see :func:`connect`.

    A cluster's other applications stay. Must be called from the main thread.
    """
    connect(cpus=(ray_config.max_replicas or ray_config.replicas) * ray_config.replica_cpus)
    tls = {"ssl_certfile": server.tls_cert_file, "ssl_keyfile": server.tls_key_file}
    files = {name: str(path) for name, path in tls.items() if path is not None}
    runs, ended = threading.Event(), threading.Event()

    def end(*signal_and_frame: Any) -> None:
        ended.set()
        if not runs.is_set():
            raise KeyboardInterrupt  # models take minutes to load, and nobody waits for the event meanwhile

    before = {sig: signal.signal(sig, end) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        serve.start(http_options={"host": server.host, "port": server.port, "keep_alive_timeout_s": 30, **files})
        try:
            serve.run(app, name=NAME)
        except RuntimeError as error:  # with the trace of a replica in it
            raise ConfigError(f"the replicas do not start: {last_line(error)}") from error
        runs.set()
        ready(server.host, server.port)
        ended.wait()
    finally:
        serve.delete(NAME)
        for sig, handler in before.items():
            signal.signal(sig, handler)
