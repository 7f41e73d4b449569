"""From an URL to the server that has the ledger, and to where the values lie if not there.

Used by the Redis tier and by ``kvboost cache``. Invariant: nothing here names a password.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvboost.store.tiers.mooncake import Mooncake
from kvboost.store.tiers.mooncake_url import parse_mooncake
from kvboost.store.tiers.redis.cluster import Cluster
from kvboost.store.tiers.redis.connecting import connector, place_of
from kvboost.store.tiers.redis.elsewhere import Elsewhere
from kvboost.store.tiers.redis.server import Patience, Server, UnavailableError


@dataclass(frozen=True, slots=True)
class Place:
    """A ledger and its values."""

    kind: str
    """What the tier is called in statistics."""
    url: str
    """Without user and password."""
    server: Server
    """Of the ledger."""
    elsewhere: Elsewhere | None
    """None: values lie beside the ledger."""

    @property
    def is_available(self) -> bool:
        """Whether all of it answered when it was last used."""
        others_are = self.elsewhere is None or self.elsewhere.is_available
        return others_are and not self.server.breaker.is_open

    def close(self) -> None:
        """Close every connection."""
        self.server.close()
        if self.elsewhere is not None:
            self.elsewhere.close()


def open_place(url: str, *, prefix: str, patience: Patience, report: Callable[[UnavailableError], None]) -> Place:
    """What an URL names. Raises ConfigError for one that cannot work, or if a package is missing.

    ``report`` is told what goes wrong with values that lie elsewhere.
    """
    if url.startswith("mooncake://"):
        mooncake = parse_mooncake(url)
        # Apart from a tier that has its values in the same Redis.
        found = connector(mooncake.ledger, prefix=f"{prefix}-mooncake")
        values = Mooncake(mooncake, patience=patience, report=report)
        name = f"mooncake://{mooncake.master}?ledger={place_of(mooncake.ledger)}"
        return Place("mooncake", name, Server(found, patience=patience), values)
    found = connector(url, prefix=prefix)
    server = Server(found, patience=patience)
    elsewhere = None if found.nodes is None else Cluster(found.nodes, patience=patience, report=report)
    return Place("redis", place_of(url), server, elsewhere)
