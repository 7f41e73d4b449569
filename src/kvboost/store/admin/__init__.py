"""All records of a place, over every namespace, without a model: what ``kvboost cache`` works with."""

from __future__ import annotations

from pathlib import Path

from kvboost.config import is_server
from kvboost.store.admin.archive import (
    ArchiveReader,
    ArchiveWriter,
    Importer,
    Outcome,
    exported,
    verified,
)
from kvboost.store.admin.base import Catalogue, Entry, Finding, KeyRing, Verdict, check, examine
from kvboost.store.admin.disk import DiskCatalogue
from kvboost.store.admin.objects import ObjectCatalogue
from kvboost.store.admin.redis import RedisCatalogue


def open_catalogue(place: str, *, create: bool = False) -> Catalogue:
    """The records of a directory, a server or a bucket.

    A server is ``redis://`` and its kin or ``mooncake://``, a bucket ``s3://``, ``gs://`` or ``az://``.
    Raises PlaceError if there is no such place; ``create`` makes a directory, for an import.
    """
    if is_server(place):
        return RedisCatalogue(place)
    if "://" in place:
        return ObjectCatalogue(place)
    return DiskCatalogue(Path(place), create=create)


__all__ = [
    "ArchiveReader",
    "ArchiveWriter",
    "Catalogue",
    "DiskCatalogue",
    "Entry",
    "Finding",
    "Importer",
    "KeyRing",
    "ObjectCatalogue",
    "Outcome",
    "RedisCatalogue",
    "Verdict",
    "check",
    "examine",
    "exported",
    "open_catalogue",
    "verified",
]
