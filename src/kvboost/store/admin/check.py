"""Whether a record is what its name says, with or without the keys it was made with.

Used by ``kvboost cache``. Invariant: :attr:`Verdict.WHOLE` is only ever said of a record that a tier with the same keys
would hand out. Without its key a record cannot be told from a forged one; that is :attr:`Verdict.LOCKED`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvboost.errors import ConfigError, ForeignRecordError, RecordError, RecordVersionError
from kvboost.store.admin.base import MAX_RECORD_BYTES
from kvboost.store.record.format import RecordFormat, inspect, space_of
from kvboost.store.record.header import Buffer, RecordHeader
from kvboost.store.record.protection import record_format
from kvboost.types import KVBlock

_KEY_BYTES = 32


class Verdict(enum.Enum):
    """What can be said about a record."""

    WHOLE = "whole"
    LOCKED = "locked"
    """It may be whole; the key to tell was not given."""
    OTHER_VERSION = "other version"
    """Of a format that this code does not read."""
    DAMAGED = "damaged"
    MISSING = "missing"
    """It was listed and is not there, or not all of it: evicted, or lost."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found."""

    verdict: Verdict
    reason: str
    """In words; empty for a whole record."""
    header: RecordHeader | None = None
    block: KVBlock | None = None
    """The block itself, if it is whole. Its tensors lie in the memory that was checked."""


class KeyRing:
    """The secrets at hand. Which of them a record was made with, and for what, the record says itself."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """``keys`` of 32 bytes, such as :func:`kvboost.store.record.protection.read_key` gives."""
        if any(len(key) != _KEY_BYTES for key in keys):
            raise ConfigError(f"a key has {_KEY_BYTES} bytes; make one with os.urandom({_KEY_BYTES})")
        self._keys = list(keys)
        self._formats: dict[bytes, RecordFormat | None] = {}

    def format_for(self, header: RecordHeader) -> RecordFormat | None:
        """What reads records like this one; None if a key for it is missing."""
        space = space_of(header)
        if space not in self._formats:
            made = (found for found in self._candidates(header) if found.space == space)
            self._formats[space] = next(made, None)
        return self._formats[space]

    def _candidates(self, header: RecordHeader) -> Iterator[RecordFormat]:
        """Formats with the keys that an engine makes of each key file, and with the keys as they are."""
        if header.keyed:
            protection = "encrypt" if header.encrypted else "mac"
            for key in self._keys:
                yield record_format(
                    header.namespace, codec=header.codec, max_bytes=MAX_RECORD_BYTES, protection=protection, key=key
                )
        macs = self._keys if header.keyed else [None]
        ciphers = self._keys if header.encrypted else [None]
        for mac, cipher in itertools.product(macs, ciphers):
            yield RecordFormat(
                header.namespace,
                codec=header.codec,
                mac_key=mac,
                encryption_key=cipher,
                max_bytes=MAX_RECORD_BYTES,
            )


def examine(head: Buffer, *, space: bytes, key: bytes) -> Finding:
    """A record by its header alone, which is shown to belong under this name: WHOLE says nothing about the rest."""
    try:
        header = inspect(head, max_bytes=MAX_RECORD_BYTES)
        if header.key != key or space_of(header) != space:
            raise ForeignRecordError("it is the record of another name")
    except RecordVersionError as error:
        return Finding(Verdict.OTHER_VERSION, str(error))
    except RecordError as error:
        return Finding(Verdict.DAMAGED, str(error))
    return Finding(Verdict.WHOLE, "", header)


def check(record: Buffer, *, space: bytes, key: bytes, keys: KeyRing) -> Finding:
    """Everything that can be checked about a record that lies under this name."""
    finding = examine(record, space=space, key=key)
    header = finding.header
    if header is None:
        return finding
    records = keys.format_for(header)
    if records is None:
        if len(record) != header.record_bytes:
            reason = f"{len(record)} bytes of a record of {header.record_bytes}"
            return Finding(Verdict.DAMAGED, reason, header)
        return Finding(Verdict.LOCKED, f"it is {_secured(header)} with a key that was not given", header)
    try:
        return Finding(Verdict.WHOLE, "", header, records.decode(record, key))
    except RecordError as error:
        return Finding(Verdict.DAMAGED, str(error), header)


def _secured(header: RecordHeader) -> str:
    ways = [("sealed", header.keyed), ("encrypted", header.encrypted)]
    return " and ".join(way for way, used in ways if used)
