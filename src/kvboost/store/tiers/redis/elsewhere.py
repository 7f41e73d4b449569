"""Where values lie that a ledger in a Redis counts, if not beside it: the nodes of a cluster, or a Mooncake Store.

Used by the ledger and by the tiers over it. Invariants: a place that fails answers as if nothing were there, and
reports that itself; nothing here is atomic together with the ledger, which is made to bear that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from kvboost.store.tiers.redis.server import UnavailableError

if TYPE_CHECKING:
    from kvboost.store.tiers.redis.ledger import Ledger


class Records(Protocol):
    """Records on their way, in the order asked for, unchecked; None for one that is not there."""

    unavailable: UnavailableError | None
    """Why the last one could not be had, if not because it is not there."""

    def __iter__(self) -> Iterator[memoryview | None]:
        """Itself."""

    def __next__(self) -> memoryview | None:
        """The next one, as soon as it is there."""

    def close(self) -> None:
        """Give up what has not come yet."""


class Elsewhere(Protocol):
    """Where values lie if not beside the ledger. Thread-safe."""

    piece_bytes: int
    """The largest value it takes."""

    max_record_bytes: int | None
    """The longest record it takes; None: any."""

    @property
    def is_available(self) -> bool:
        """Whether all of it answered when it was last used."""

    def takes(self, name: bytes) -> bool:
        """Whether a value of this name could probably be written now. Asks nobody."""

    def exist(self, names: Sequence[bytes]) -> list[bool | None]:
        """Which values are there; None where that is not known."""

    def load(self, keys: Sequence[bytes], *, ledger: Ledger, max_bytes: int) -> Records:
        """The records under these keys, none longer than ``max_bytes``."""

    def put(self, names: Sequence[bytes], pieces: Sequence[tuple[memoryview, ...]], *, until_kept_ms: int) -> bool:
        """Write one record's pieces, the first one last. False if that failed.

        They end by themselves after ``until_kept_ms`` if it can do that, however late they come there.
        """

    def keep(self, names: Sequence[bytes], *, ttl_ms: int) -> bool:
        """What was put stays, or ends after ``ttl_ms`` if that is not 0. False if it is gone."""

    def unlink(self, names: Sequence[bytes]) -> list[bytes]:
        """Remove values; those of them that are gone now."""

    def scan(self, prefix: bytes) -> Iterator[list[bytes] | None]:
        """The names of all values that begin with this, some at a time, as far as it can tell; None for some that a
        place did not tell now."""

    def forget(self, beginning: bytes) -> None:
        """Remove all values whose names begin with this, counted or not, if it does not tell their names."""

    def close(self) -> None:
        """Close every connection."""
