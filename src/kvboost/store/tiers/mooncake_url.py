"""What the URL of a Mooncake Store says.

Used by the Redis tier and by :mod:`kvboost.store.tiers.mooncake`. Invariant: no message holds a password.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

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
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or _PORT
    except ValueError:  # its text may hold a password
        host, port, parts = None, _PORT, urlsplit("")
    given = [option.partition("=") for option in parts.query.split("&")]
    options = {name: value for name, _, value in given}
    if not host or not options.get("ledger") or not set(options) <= set(_OPTIONS):
        raise ConfigError(
            "this is no URL of a Mooncake Store; give mooncake://MASTER:PORT?ledger=redis://HOST:PORT, and if needed "
            "&segment=SIZE (memory that this process gives to the store), &protocol=rdma and &device=NAME"
        )
    return MooncakeURL(
        master=f"{host}:{port}",
        ledger=_decoded(options["ledger"]),
        segment_bytes=parse_bytes(unquote(options.get("segment", "0")), name="segment"),
        protocol=unquote(options.get("protocol", "tcp")),
        device=unquote(options.get("device", "")),
    )


def _decoded(ledger: str) -> str:
    """An URL within an URL: decoded as far as its password does not reach, which Redis' own URLs have encoded."""
    login, at, rest = ledger.rpartition("@")
    return login + at + unquote(rest)


def giving_nothing(url: str) -> str:
    """The same URL for who only looks: memory that such a process gave would take others' values along when it ends."""
    if not url.startswith("mooncake://"):
        return url
    place, _, query = url.partition("?")
    return f"{place}?{'&'.join(option for option in query.split('&') if not option.startswith('segment='))}"


def own_address(master: str, *, timeout_s: float) -> str:
    """The address of this machine as the master sees it. Raises OSError if nobody answers there."""
    host, _, port = master.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as probe:
        own: str = probe.getsockname()[0]
        return own
