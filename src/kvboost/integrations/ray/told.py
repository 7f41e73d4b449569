"""What a replica tells the routers, and how a router takes it: Serve carries both as plain values.

Written by :mod:`kvboost.integrations.ray.replica`, read by :mod:`kvboost.integrations.ray.router`. Needs neither ray
nor torch. Invariant: everything here is a hint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from kvboost.core.keys import fingerprint_root
from kvboost.fleet.index import KeyUpdate, short_keys
from kvboost.types import Fingerprint

MAX_BLOCKS = 2**16  # told of one replica: a megabyte every few seconds
_NONE = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True)
class Facts:
    """What of a replica does not change: how it cuts prompts and names their KV."""

    fingerprint: Fingerprint
    """Of the engine's own tenant."""
    chunking: str
    chunk_tokens: int
    approximate: bool
    """Whether it uses text behind other text."""
    shares: bool
    """Whether what it computes goes to a tier that all replicas read."""

    def to_dict(self) -> dict[str, Any]:
        """As Serve carries it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """As it was sent."""
        return cls(**{**given, "fingerprint": Fingerprint(**given["fingerprint"])})

    def root(self, tenant: str) -> bytes:
        """What the keys of a tenant's prompts are derived from; callers without a tenant have the engine's own."""
        return fingerprint_root(replace(self.fingerprint, tenant=tenant or self.fingerprint.tenant))


def held_update(held: Sequence[tuple[bytes, bytes]]) -> KeyUpdate:
    """Everything a replica has in memory, from the key and the content key of each block."""
    keys = short_keys([key for pair in held for key in pair])
    return KeyUpdate(np.unique(keys), _NONE, whole=True)
