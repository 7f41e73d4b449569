"""Records on their way between a place and an archive, each checked.

Used by ``kvboost cache``. Invariants: a damaged record goes neither out nor in; an import writes through a tier of the
place, so that budget, eviction and other processes are its business as ever; an import that was broken off goes on
where it stopped, as what is there is passed over unread.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvboost.errors import PlaceError
from kvboost.store.admin.archive import ArchiveReader, ArchiveWriter
from kvboost.store.admin.base import Catalogue, Entry, ImportTier
from kvboost.store.admin.check import Finding, KeyRing, Verdict, check
from kvboost.store.record.format import space_of
from kvboost.store.record.header import RecordHeader
from kvboost.types import PutOutcome


def verified(catalogue: Catalogue, entries: Iterable[Entry], *, keys: KeyRing) -> Iterator[tuple[Entry, Finding]]:
    """Each record and what can be said about it."""
    for entry, record in catalogue.records(entries):
        if record is None:
            yield entry, Finding(Verdict.MISSING, "it is not there any more")
        else:
            yield entry, check(record, space=entry.space, key=entry.key, keys=keys)


def exported(
    catalogue: Catalogue, entries: Iterable[Entry], *, keys: KeyRing, into: ArchiveWriter
) -> Iterator[tuple[Entry, Finding]]:
    """Write what is whole, and what is locked as it stands; say of each record what was found."""
    for entry, record in catalogue.records(entries):
        if record is None:
            yield entry, Finding(Verdict.MISSING, "it is not there any more")
            continue
        finding = check(record, space=entry.space, key=entry.key, keys=keys)
        if finding.verdict in (Verdict.WHOLE, Verdict.LOCKED):
            into.add(record)
        yield entry, finding
    into.finish()


class Outcome(enum.Enum):
    """What came of a record in an archive."""

    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"
    """Whole, but it does not fit the capacity."""
    LOCKED = "locked"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One record of an archive."""

    header: RecordHeader
    outcome: Outcome
    reason: str = ""


class Importer:
    """Brings the records of an archive into a place. ``capacity_bytes`` is the limit of a place that has none yet."""

    def __init__(self, catalogue: Catalogue, *, keys: KeyRing, capacity_bytes: int | None) -> None:
        self._catalogue = catalogue
        self._keys = keys
        self._capacity = capacity_bytes
        self._space: bytes | None = None
        self._tier: ImportTier | None = None
        self.evicted = 0
        """Records that were evicted for new ones."""

    def arrivals(self, archive: ArchiveReader) -> Iterator[Arrival]:
        """Import each record; what came of it. Raises PlaceError if the place cannot be used."""
        try:
            for header in archive:
                yield self._arrival(header, archive)
        finally:
            self._close()

    def _arrival(self, header: RecordHeader, archive: ArchiveReader) -> Arrival:
        records = self._keys.format_for(header)
        if records is None:
            return Arrival(header, Outcome.LOCKED, "a key it was made with was not given")
        tier = self._tier_for(header)
        if tier.contains([header.key])[0]:
            return Arrival(header, Outcome.PRESENT)
        finding = check(archive.record(), space=space_of(header), key=header.key, keys=self._keys)
        if finding.block is None:
            return Arrival(header, Outcome.DAMAGED, finding.reason)
        outcome = tier.store(finding.block)
        if outcome is PutOutcome.REFUSED and (failures := tier.health()):
            kinds = ", ".join(failures)
            raise PlaceError(f"{self._catalogue.place} takes no records ({kinds}); repair that and import again")
        return Arrival(header, Outcome(outcome.value))

    def _tier_for(self, header: RecordHeader) -> ImportTier:
        """A tier for the record's space. An export has spaces one after the other: one is open at a time."""
        space = space_of(header)
        if self._tier is None or self._space != space:
            self._close()
            records = self._keys.format_for(header)
            assert records is not None
            self._tier = self._catalogue.tier(records, capacity_bytes=self._capacity)
            self._space = space
        return self._tier

    def _close(self) -> None:
        if self._tier is not None:
            self._tier.flush()
            self.evicted += self._tier.stats().evictions
            self._tier.close()
            self._tier = None
