"""From settings to a running server: what ``kvboost serve`` calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvboost.engine import KVBoost
from kvboost.errors import ConfigError
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve.run import serve
from kvboost.serve.security.auth import Keys, check_binding
from kvboost.serve.security.limits import Limits


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Everything a server is told; plain types, as a command line, the environment or a file give them."""

    model: str
    """A folder or a hub name, as Transformers takes it."""
    name: str | None = None
    """What clients call the model; without it, the last part of ``model``."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    api_keys: Sequence[str] = field(default=(), repr=False)
    """Each is a tenant of its own."""
    admin_key: str | None = field(default=None, repr=False)
    allow_open: bool = False
    """Let other machines in without a key."""
    dtype: str = "auto"
    device: str | None = None
    max_running: int = 16
    """Requests that are computed side by side."""
    max_waiting: int = 256
    kv_bytes: str = "2GiB"
    """KV that running requests may come to hold together."""
    deterministic: bool = False
    """The same request, with a seed or temperature 0, gives the same bytes, alone or among others; slower."""
    drain_seconds: float = 30.0
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`kvboost.serve.Limits` that are not as by default."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`kvboost.EngineConfig` that are not as by default, and arguments of ``from_pretrained``."""

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.name or Path(os.path.abspath(self.model)).name  # "." has no name of its own


def main(
    settings: ServeSettings,
    *,
    ready: Callable[[str, int], None] | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> None:
    """Load the model and answer requests until SIGTERM or SIGINT. ``ready`` is called with the address.

    ``warn`` is told if what may be admitted is more than the memory there is.
    """
    # What cannot work is said before the model is loaded.
    check_binding(settings.host, Keys(settings.api_keys, admin_key=settings.admin_key), allow_open=settings.allow_open)
    if settings.engine.get("draft") is not None:
        raise ConfigError("requests that run side by side are decoded without a draft; leave draft out of a server")
    try:
        limits = Limits(**settings.limits)
    except TypeError as error:
        raise ConfigError(f"unknown limit: {error}") from error
    with (
        KVBoost.from_pretrained(
            settings.model, dtype=settings.dtype, device=settings.device, kv_bytes=settings.kv_bytes, **settings.engine
        ) as engine,
        BatchRunner(
            engine,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            deterministic=settings.deterministic,
        ) as runner,
    ):
        if (short := runner.shortfall()) is not None:
            warn(short)
        serve(
            engine,
            runner,
            model_name=settings.served_name,
            host=settings.host,
            port=settings.port,
            api_keys=settings.api_keys,
            admin_key=settings.admin_key,
            allow_open=settings.allow_open,
            limits=limits,
            drain_seconds=settings.drain_seconds,
            ready=ready,
        )
