"""What one replica holds, in eight bytes per key, as it is sent to the routers.

A router gives the updates of replicas to its :class:`kvboost.fleet.index.FleetIndex`. Replicas under Ray Serve send all
keys every time (:mod:`kvboost.integrations.ray.told`); those of the simulator send what has changed. Invariant: an
update that is lost or late makes a hint stale, never an answer wrong, as the replica looks into its own store anyway.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvboost.errors import ConfigError, DamagedRecordError

ShortKeys = npt.NDArray[np.uint64]
"""The first eight bytes of keys. Never 0, which marks an empty place in an index."""

SHORT_BYTES = 8
_KEY_BYTES = 32  # of SHA-256
_MAGIC = b"KVS1"
_HEADER = struct.Struct("<4s?QQ")
_LITTLE_ENDIAN = np.dtype("<u8")


def short_keys(keys: Sequence[bytes]) -> ShortKeys:
    """The short form of prefix and content keys. Of ten million keys two share one with a chance of 3 in a million."""
    joined = b"".join(keys)
    if len(joined) != _KEY_BYTES * len(keys):
        raise ConfigError(f"keys must have {_KEY_BYTES} bytes each; give the keys that kvboost.core.keys makes")
    return np.maximum(np.frombuffer(joined, dtype=_LITTLE_ENDIAN)[:: _KEY_BYTES // SHORT_BYTES], np.uint64(1))


def joined_short_keys(joined: bytes | bytearray) -> ShortKeys:
    """Of the first bytes of keys, one behind the other."""
    return np.maximum(np.frombuffer(joined, dtype=_LITTLE_ENDIAN), np.uint64(1))


@dataclass(frozen=True)
class KeyUpdate:
    """What a replica holds (``whole``), or what has changed since its last update."""

    added: ShortKeys
    dropped: ShortKeys
    whole: bool

    def to_bytes(self) -> bytes:
        """For sending: eight bytes per key behind a short header."""
        header = _HEADER.pack(_MAGIC, self.whole, len(self.added), len(self.dropped))
        return header + b"".join(keys.astype(_LITTLE_ENDIAN).tobytes() for keys in (self.added, self.dropped))

    @classmethod
    def from_bytes(cls, data: bytes) -> KeyUpdate:
        """As it was sent. Raises DamagedRecordError for anything else."""
        if len(data) < _HEADER.size or data[:4] != _MAGIC or data[4] > 1:
            raise DamagedRecordError("these bytes are no key update; ask the replica for a whole one")
        _, whole, added, dropped = _HEADER.unpack_from(data)
        if len(data) != _HEADER.size + 8 * (added + dropped):
            raise DamagedRecordError("this key update is cut short or too long; ask the replica for a whole one")
        keys = np.frombuffer(data, dtype=_LITTLE_ENDIAN, offset=_HEADER.size).astype(np.uint64)
        if not keys.all():
            raise DamagedRecordError("this key update names no key (0); ask the replica for a whole one")
        return cls(keys[:added], keys[added:], whole)
