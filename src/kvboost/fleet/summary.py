"""What one replica holds, in eight bytes per key: kept beside its store, sent to the routers.

A router gives the updates of replicas to its :class:`kvboost.fleet.index.FleetIndex`. Replicas under Ray Serve send all
keys every time (:mod:`kvboost.integrations.ray.told`); those of the simulator send what has changed, which their
:class:`KeySummary` knows, as it is told of every block that a store keeps or drops. Invariants: a
content key is held as long as any block has it; an update that is lost or late makes a hint stale, never an answer
wrong, as the replica looks into its own store anyway.
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

_KEY_BYTES = 32  # of SHA-256
_MAGIC = b"KVS1"
_HEADER = struct.Struct("<4s?QQ")
_LITTLE_ENDIAN = np.dtype("<u8")


def short_keys(keys: Sequence[bytes]) -> ShortKeys:
    """The short form of prefix and content keys. Of ten million keys two share one with a chance of 3 in a million."""
    joined = b"".join(keys)
    if len(joined) != _KEY_BYTES * len(keys):
        raise ConfigError(f"keys must have {_KEY_BYTES} bytes each; give the keys that kvboost.core.keys makes")
    first = np.frombuffer(joined, dtype=_LITTLE_ENDIAN)[:: _KEY_BYTES // 8]
    return np.maximum(first, np.uint64(1))


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


class KeySummary:
    """The keys of one replica's blocks: those they are stored under, and those of their content. Not thread-safe."""

    def __init__(self) -> None:
        self._content: dict[int, int] = {}  # of each block
        self._blocks: dict[int, int] = {}  # with this content, how many
        self._added: set[int] = set()
        self._dropped: set[int] = set()

    def __len__(self) -> int:
        """How many blocks."""
        return len(self._content)

    def stored(self, keys: Sequence[bytes], *, content_keys: Sequence[bytes]) -> None:
        """Blocks were stored under ``keys``. One that is known already changes nothing."""
        shorts = zip(short_keys(keys).tolist(), short_keys(content_keys).tolist(), strict=True)
        for key, content in shorts:
            if key in self._content:
                continue
            if key not in self._blocks:
                self._note(key, self._added, self._dropped)
            self._content[key] = content
            if content not in self._blocks and content not in self._content:
                self._note(content, self._added, self._dropped)
            self._blocks[content] = self._blocks.get(content, 0) + 1

    def removed(self, keys: Sequence[bytes]) -> None:
        """The blocks under ``keys`` were evicted. One that is not known changes nothing."""
        for key in short_keys(keys).tolist():
            content = self._content.pop(key, None)
            if content is None:
                continue
            if key not in self._blocks:
                self._note(key, self._dropped, self._added)
            self._blocks[content] -= 1
            if not self._blocks[content]:
                del self._blocks[content]
                if content not in self._content:
                    self._note(content, self._dropped, self._added)

    def clear(self) -> None:
        """The store was cleared."""
        for key in self._content.keys() | self._blocks.keys():
            self._note(key, self._dropped, self._added)
        self._content.clear()
        self._blocks.clear()

    def changes(self) -> KeyUpdate:
        """What has changed since the last call of this or of :meth:`snapshot`."""
        update = KeyUpdate(_array(self._added), _array(self._dropped), whole=False)
        self._added.clear()
        self._dropped.clear()
        return update

    def snapshot(self) -> KeyUpdate:
        """Everything, for a router that is new or has missed an update. What follows are changes to it."""
        self._added.clear()
        self._dropped.clear()
        return KeyUpdate(_array(self._content.keys() | self._blocks.keys()), _array(set()), whole=True)

    @staticmethod
    def _note(key: int, where: set[int], opposite: set[int]) -> None:
        if key in opposite:
            opposite.discard(key)  # the routers have not heard of it
        else:
            where.add(key)


def _array(keys: set[int]) -> ShortKeys:
    return np.fromiter(keys, dtype=np.uint64, count=len(keys))
