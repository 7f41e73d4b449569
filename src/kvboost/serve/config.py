"""How a server is reached, and by whom.

Given to :func:`kvboost.serve.serve`, and made from flags, environment and file by :mod:`kvboost.cli.settings`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvboost.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one server. What a request may ask for is in :class:`kvboost.serve.Limits`."""

    host: str = "127.0.0.1"
    """Listen on this address. Others than this machine's own need API keys, or ``allow_open``."""
    port: int = 8000
    """Listen on this port; 0 takes a free one."""
    served_model_name: str | None = None
    """What clients call the model. If left out, the last part of its folder or hub name."""
    adapter: tuple[str, ...] = ()
    """Also serve an adapter of the model as a model of its own: ``NAME=PATH``; may be given several times. The path is
    a folder or a hub name, as PEFT takes it."""
    api_key_file: str | Path | None = None
    """A file with one API key per line; each is a tenant of its own. Lines ``NAME: KEY`` with the same name are keys of
    one tenant. SIGHUP reads the file again. Without one, whoever reaches the server may do everything."""
    admin_key_file: str | Path | None = None
    """A file with the key for /metrics and /v1/cache, which API keys do not open."""
    secret_file: str | Path | None = None
    """A file with 32 random bytes, or 64 hex digits, that tenants are named with. Servers that share a cache need the
    same one. If left out, ``~/.config/kvboost/secret``, which is made if it is not there."""
    allow_open: bool = False
    """Let everybody who can reach ``host`` use the model without a key."""
    cors_origin: tuple[str, ...] = ()
    """Let pages of this origin (``https://app.example``) call the server from a browser; may be given several times.
    ``*`` is every origin and needs API keys. Without any, browsers get no leave."""
    tls_cert_file: str | Path | None = None
    """Serve HTTPS with this certificate chain (PEM). Needs ``tls_key_file``."""
    tls_key_file: str | Path | None = None
    """The private key of that certificate (PEM)."""
    root_path: str = ""
    """The path under which a proxy shows this server, such as ``/llm``. Requests may come with it or without."""
    kv_events: str | None = None
    """Publish what the cache stores and evicts here, for cache-aware routers: ``tcp://*:5557``. In vLLM's format over
    ZeroMQ; addresses of other machines are connected to. The events have the token ids of all prompts in them, and
    nobody is asked for a key. Needs ``kvboost[fleet]``. See docs/fleet.md."""
    kv_events_replay: str | None = None
    """Let subscribers ask here for events that they missed: ``tcp://*:5558``."""
    kv_events_topic: str = ""
    """The topic of the events, as some routers want one: ``kv@NAME@MODEL``."""
    drain_seconds: float = 30.0
    """Time for running requests to finish at the end; then they are cancelled."""

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """The name and the path of each adapter."""
        pairs = [given.partition("=") for given in self.adapter]
        # Shells leave ~ as it is after a =.
        return [(name if path else "", os.path.expanduser(path)) for name, _, path in pairs]

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port={self.port} is no port; give a number up to 65535, or 0 for a free one")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError("TLS needs a certificate and its key; give both tls_cert_file and tls_key_file")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII):
            raise ConfigError(f"root_path={self.root_path!r} is no path; write it as /llm, without a slash at its end")
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            raise ConfigError("kv_events_replay and kv_events_topic are for KV events; give kv_events, too")
        names = [name for name, _ in self.adapters]
        if not all(names) or len({*names, self.served_model_name}) <= len(names):
            raise ConfigError("every adapter is a model with a name of its own; write --adapter NAME=PATH for each")
        for origin in self.cors_origin:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(
                    f"cors_origin={origin!r} is no origin; write it as browsers do, https://app.example, without a path"
                )
