"""How many replicas a fleet has, and what each takes of the machines. Needs neither ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.errors import ConfigError


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
