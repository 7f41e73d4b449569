"""Opens object stores, and reads what lies in them beside records: the limit, and who has something there.

Used by the object tier and by ``kvboost cache``; obstore does the work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kvboost.errors import ConfigError, with_extra

PROBE = "probe"
"""An object that is asked for to see whether the store answers; it need not be there."""
_VENDORS = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
CAPACITY = "capacity"
"""The object that holds the limit of one model and tenant, in bytes; without it there is none."""


@dataclass(frozen=True, slots=True)
class Failures:
    """What obstore raises."""

    absent: tuple[type[Exception], ...]
    present: tuple[type[Exception], ...]
    all: tuple[type[Exception], ...]


def tenants_in(objects: Any) -> list[str]:
    """The folders of all tenants. Raises what the store fails with."""
    names = (name.strip("/") for name in objects.list_with_delimiter()["common_prefixes"])
    return [name for name in names if re.fullmatch("[0-9a-f]{64}", name)]


def read_limit(objects: Any, failures: Failures) -> int | None:
    """The limit that lies in a bucket; None if there is none. Raises what the store fails with."""
    try:
        text = bytes(objects.get(CAPACITY).bytes())
    except failures.absent:
        return None
    return int(text) if text.isdigit() else None


def open_objects(url: str, *, timeout_s: float, config: Mapping[str, Any] | None = None) -> tuple[Any, Failures]:
    """The store behind an URL, by obstore, and what it raises. Raises ConfigError for an URL that cannot work."""
    try:
        from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
        from obstore.store import from_url
    except ImportError as error:
        raise ConfigError(f"an object store as a tier needs obstore; {with_extra('s3')}") from error
    limit = timedelta(seconds=timeout_s)
    settings = dict(config or {})
    # Given any of these, obstore looks for none of them in the environment.
    vendor = _VENDORS.get(url.partition("://")[0], "AWS")
    plain = os.environ.get(f"{vendor}_ALLOW_HTTP", "").lower() in ("1", "true")
    options = {"timeout": limit, "connect_timeout": limit, "allow_http": plain, **settings.pop("client_options", {})}
    make: Any = from_url  # typed for each kind of store apart
    try:
        # No retries: they would take longer than a miss costs.
        retries = {"max_retries": 0, "retry_timeout": limit}
        objects = make(url, config=settings or None, client_options=options, retry_config=retries)
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{url} cannot be opened ({str(error).splitlines()[0]}); give an URL such as s3://BUCKET/PREFIX "
            f"and the {vendor}_* variables it needs, or redis://HOST:PORT for a server"
        ) from error
    return objects, Failures(
        (FileNotFoundError, NotFoundError), (FileExistsError, AlreadyExistsError), (BaseError, OSError)
    )
