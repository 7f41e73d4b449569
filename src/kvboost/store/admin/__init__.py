"""All records of a place, over every namespace, without a model: what ``kvboost cache`` works with."""

from __future__ import annotations

from pathlib import Path

from kvboost.config import is_server
from kvboost.errors import PlaceError
from kvboost.store.admin.base import Catalogue
from kvboost.store.admin.disk import DiskCatalogue
from kvboost.store.admin.redis import RedisCatalogue


def open_catalogue(place: str, *, create: bool = False) -> Catalogue:
    """The records of a directory or a server: ``redis://`` and its kin, or ``mooncake://``.

    Raises PlaceError if there is no such place; ``create`` makes a directory.
    """
    if is_server(place):
        return RedisCatalogue(place)
    if "://" in place:
        raise PlaceError(f"{place} is no place of records; give a cache directory, redis://HOST:PORT or its kin")
    return DiskCatalogue(Path(place), create=create)
