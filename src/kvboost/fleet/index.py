"""Which replicas hold a key, in eight bytes per key: what each of them sends, and one table of it for all.

Used by :class:`kvboost.fleet.route.Router` and by whoever carries keys to it. The table uses open addressing; keys
are SHA-256, so their own bits are the hash. Invariants: keys that are lost or late make a hint stale, never an
answer wrong; a row that nobody holds any more stays until the table is made again, so no search ends early.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvboost.errors import ConfigError

ShortKeys = npt.NDArray[np.uint64]
"""The first eight bytes of keys. Never 0, which marks an empty row in an index."""

SHORT_BYTES = 8
_KEY_BYTES = 32  # of SHA-256
_LITTLE_ENDIAN = np.dtype("<u8")


def short_keys(keys: Sequence[bytes]) -> ShortKeys:
    """The short form of prefix and content keys. Of ten million keys two share one with a chance of 3 in a million."""
    joined = b"".join(keys)
    if len(joined) != _KEY_BYTES * len(keys):
        raise ConfigError(f"keys must have {_KEY_BYTES} bytes each; give the keys that kvboost.core.keys makes")
    return np.maximum(np.frombuffer(joined, dtype=_LITTLE_ENDIAN)[:: _KEY_BYTES // SHORT_BYTES], np.uint64(1))


def keys_of_blocks(held: Sequence[tuple[bytes, bytes]]) -> ShortKeys:
    """Each once, from the key and the content key of every block that a replica has in memory."""
    return np.unique(short_keys([key for pair in held for key in pair]))


def pack_keys(keys: ShortKeys) -> bytes:
    """For sending: eight bytes per key."""
    return keys.astype(_LITTLE_ENDIAN).tobytes()


def unpack_keys(data: bytes) -> ShortKeys:
    """As they were sent."""
    return np.frombuffer(data, dtype=_LITTLE_ENDIAN).astype(np.uint64)


Holders = npt.NDArray[np.uint64]
"""A row of bits per key, 64 replicas in a word: replica n is bit ``n % 64`` of word ``n // 64``."""

_LEAST_ROWS = 1024
_WORD = 64


class FleetIndex:
    """What every replica of a fleet said it holds. Not thread-safe: it belongs to one event loop."""

    def __init__(self) -> None:
        self._table: Holders = np.zeros((_LEAST_ROWS, 2), dtype=np.uint64)
        self._taken = 0  # rows with a key, held by somebody or not
        self._bits: dict[str, int] = {}
        self._free: list[int] = []

    def bit_of(self, replica: str) -> int | None:
        """The number of its bit in :data:`Holders`; None if nothing is known of it."""
        return self._bits.get(replica)

    def replace(self, replica: str, keys: ShortKeys) -> None:
        """``replica`` holds these keys and no others. One that is new joins the fleet."""
        word, bit = self._mask_of(replica)
        self._table[:, 1 + word] &= ~bit
        self.add(replica, keys)

    def add(self, replica: str, keys: ShortKeys) -> None:
        """``replica`` holds these keys too. One that is new joins the fleet."""
        word, bit = self._mask_of(replica)
        if len(keys):
            rows = self._insert(keys)  # may make a new table
            self._table[rows, 1 + word] |= bit

    def forget(self, replica: str) -> None:
        """``replica`` has gone, and what it held with it."""
        if replica in self._bits:
            word, bit = self._mask_of(replica)
            self._table[:, 1 + word] &= ~bit
            self._free.append(self._bits.pop(replica))

    def holders(self, keys: ShortKeys) -> Holders:
        """For each key, who holds it: [keys, words]."""
        rows, known = self._find(keys)
        held = self._table[rows, 1:]
        held[~known] = 0
        return held

    def held_by(self, replica: str, keys: ShortKeys) -> npt.NDArray[np.bool_]:
        """Which of these keys a replica holds."""
        bit = self._bits.get(replica)
        if bit is None:
            return np.zeros(len(keys), dtype=bool)
        bits = self.holders(keys)[:, bit // _WORD] >> np.uint64(bit % _WORD)
        return (bits & np.uint64(1)).astype(bool)

    def _mask_of(self, replica: str) -> tuple[int, np.uint64]:
        bit = self._bits.get(replica)
        if bit is None:
            if not replica:
                raise ConfigError("a replica needs a name; give the one that its requests are sent to")
            bit = self._bits[replica] = self._free.pop() if self._free else len(self._bits)
            words = bit // _WORD + 1
            if words >= self._table.shape[1]:
                wider = np.zeros((len(self._table), 1 + words), dtype=np.uint64)
                wider[:, : self._table.shape[1]] = self._table
                self._table = wider
        return bit // _WORD, np.uint64(1) << np.uint64(bit % _WORD)

    def _find(self, keys: ShortKeys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The row of each key, and whether it is there; else the empty row where it would be."""
        names, last = self._table[:, 0], len(self._table) - 1
        rows = (keys & np.uint64(last)).astype(np.int64)
        there = names[rows]
        known = there == keys
        on = np.flatnonzero(~known & (there != 0))
        while len(on):  # further from their own row, a few at a time
            rows[on] = (rows[on] + 1) & last
            there = names[rows[on]]
            known[on] = there == keys[on]
            on = on[(there != keys[on]) & (there != 0)]
        return rows, known

    def _insert(self, keys: ShortKeys) -> npt.NDArray[np.int64]:
        """The row of each key, made if there was none."""
        if 2 * (self._taken + len(keys)) > len(self._table):
            self._rebuild(len(keys))
        rows, known = self._find(keys)
        new = np.flatnonzero(~known)
        while len(new):
            # Two new keys may want one empty row: the one that reads itself back has it, the other looks further.
            self._table[rows[new], 0] = keys[new]
            won = self._table[rows[new], 0] == keys[new]
            self._taken += len(np.unique(rows[new[won]]))
            new = new[~won]
            rows[new], found = self._find(keys[new])
            new = new[~found]
        return rows

    def _rebuild(self, coming: int) -> None:
        """Without the keys that nobody holds, and with room for as many as there are and are ``coming``."""
        held = self._table[self._table[:, 1:].any(axis=1)]
        rows = _LEAST_ROWS
        while rows < 3 * (len(held) + coming):  # so a table that is half full is doubled
            rows *= 2
        self._table = np.zeros((rows, self._table.shape[1]), dtype=np.uint64)
        self._taken = 0
        rows_of_held = self._insert(held[:, 0])
        self._table[rows_of_held, 1:] = held[:, 1:]
