"""How a server is reached, and by whom.

Given to :func:`kvboost.serve.serve`, and made from flags, environment and file by :mod:`kvboost.cli.settings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one server. What a request may ask for is in :class:`kvboost.serve.Limits`."""

    host: str = "127.0.0.1"
    """Listen on this address. Others than this machine's own need API keys, or ``allow_open``."""
    port: int = 8000
    """Listen on this port; 0 takes a free one."""
    name: str | None = None
    """What clients call the model. If left out, the last part of its folder or hub name."""
    api_key_file: str | Path | None = None
    """A file with one API key per line; each is a tenant of its own. Without one, everybody on this machine may do
    everything."""
    admin_key_file: str | Path | None = None
    """A file with the key for /metrics and /v1/cache, which API keys do not open."""
    allow_open: bool = False
    """Let everybody who can reach ``host`` use the model without a key."""
    drain_seconds: float = 30.0
    """Time for running requests to finish at the end; then they are cancelled."""
