"""How many replicas a fleet has; joining a Ray cluster, or starting a Ray of this process's own; what Ray's errors say.

Used by ``kvboost serve --ray``. Invariant: needs no torch, and Ray only to join one.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib.util import find_spec

from kvboost.errors import ConfigError, with_extra


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Settings of a server under Ray Serve (``kvboost serve --ray``)."""

    replicas: int = 1
    """Copies of the model."""
    max_replicas: int | None = None
    """Start more copies under load, up to this many. If left out, there are always ``replicas``."""
    target_requests: float = 8.0
    """Requests per copy that Ray aims at when it starts and ends copies."""
    replica_cpus: float = 1.0
    """CPUs that each copy reserves."""
    replica_gpus: float = 0.0
    """GPUs that each copy reserves."""
    fronts: int = 1
    """Processes that take the requests and choose the copy for each."""

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.fronts < 1:
            raise ConfigError(f"replicas={self.replicas} and fronts={self.fronts} must be 1 or more each")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas={self.max_replicas} is less than replicas={self.replicas}; give more")
        if self.target_requests <= 0 or self.replica_cpus < 0 or self.replica_gpus < 0:
            raise ConfigError("target_requests must be above 0, replica_cpus and replica_gpus 0 or more")


_OBJECT_STORE_BYTES = 256 * 2**20  # requests and answers pass through it, no KV does


def connect(*, cpus: float) -> None:
    """Join the cluster that ``RAY_ADDRESS`` names; else start a Ray that has ``cpus`` for its actors, and one more.

    A process that is connected already stays so.
    """
    import ray

    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level="error")
        return
    ray.init(
        address="local",  # not another one of this machine's
        num_cpus=max(os.cpu_count() or 1, math.ceil(cpus) + 1),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level="error",
    )


def last_line(error: Exception) -> str:
    """What went wrong in another process: Ray's messages end with it, behind that process's trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


def need_ray() -> None:
    """Raise ConfigError without Ray."""
    if find_spec("ray") is None:
        raise ConfigError(f"ray is missing; {with_extra('ray')}")
