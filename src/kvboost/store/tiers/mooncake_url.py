"""What the URL of a Mooncake Store says.

Used by the Redis tier and by :mod:`kvboost.store.tiers.mooncake`. Invariant: no message holds a password.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from kvboost.config import parse_bytes
from kvboost.errors import ConfigError

_PORT = 50051
_OPTIONS = ("ledger", "segment", "protocol", "device")


@dataclass(frozen=True, slots=True)
class MooncakeURL:
    """``mooncake://MASTER:PORT?ledger=redis://HOST:PORT``."""

    master: str
    ledger: str
    segment_bytes: int
    """Of this process's memory, given to the store; 0 where other processes do that."""
    protocol: str
    device: str
    """Names of RDMA devices; empty for TCP."""


def parse_mooncake(url: str) -> MooncakeURL:
    """What an URL says. Raises ConfigError for one that cannot work."""
    parts = urlsplit(url)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if not parts.hostname or "ledger" not in options or not set(options) <= set(_OPTIONS):
        raise ConfigError(
            "this is no URL of a Mooncake Store; give mooncake://MASTER:PORT?ledger=redis://HOST:PORT, and if needed "
            "&segment=SIZE (memory that this process gives to the store), &protocol=rdma and &device=NAME"
        )
    return MooncakeURL(
        master=f"{parts.hostname}:{parts.port or _PORT}",
        ledger=options["ledger"],
        segment_bytes=parse_bytes(options.get("segment", 0), name="segment"),
        protocol=options.get("protocol", "tcp"),
        device=options.get("device", ""),
    )


def own_address(master: str) -> str:
    """The address of this machine as the master sees it."""
    host, _, port = master.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
        return own
