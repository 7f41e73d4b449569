"""What has changed in a simulated replica's memory since its last update.

Told of every block that the store keeps or drops. Invariant: a content key is held as long as any block has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvboost.fleet.index import FleetIndex, ShortKeys, short_keys


class SimulatedIndex(FleetIndex):
    """Hears also what a replica holds no longer: Ray's routers get whole lists instead."""

    def drop(self, replica: str, keys: ShortKeys) -> None:
        """``replica`` does not hold these keys any more."""
        word, bit = self._mask_of(replica)
        rows, known = self._find(keys)
        self._table[rows[known], 1 + word] &= ~bit


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

    def changes(self) -> tuple[ShortKeys, ShortKeys]:
        """The keys that were added since the last call of this, and those that were dropped."""
        changed = _array(self._added), _array(self._dropped)
        self._added.clear()
        self._dropped.clear()
        return changed

    @staticmethod
    def _note(key: int, where: set[int], opposite: set[int]) -> None:
        if key in opposite:
            opposite.discard(key)  # the routers have not heard of it
        else:
            where.add(key)


def _array(keys: set[int]) -> ShortKeys:
    return np.fromiter(keys, dtype=np.uint64, count=len(keys))


def keys_of(index: FleetIndex) -> int:
    """How many keys of an index some replica holds."""
    return int(np.count_nonzero(index._table[:, 1:].any(axis=1)))
