"""What the ``kvboost cache`` commands share: selecting and describing records, confirmation.

Used by :mod:`kvboost.cli.cache`. Invariant: digits that begin nothing, or several things, are a ConfigError that says
where to look.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from kvboost.errors import ConfigError
from kvboost.types import tenant_digest

if TYPE_CHECKING:
    from kvboost.store.admin.base import Catalogue, Entry, KeyRing
    from kvboost.store.record.header import RecordHeader

_MIN_DIGITS = 4


def open_location(place: str, *, create: bool = False) -> AbstractContextManager[Catalogue]:
    """The records of a directory or server, for one ``with`` block."""
    from kvboost.store.admin import open_catalogue

    return closing(open_catalogue(place, create=create))


def select_records(catalogue: Catalogue, tenant: str | None, space: str | None) -> Iterator[Entry]:
    """The records of a tenant and of a space, where these are given."""
    digest = tenant_digest(tenant) if tenant is not None else None
    wanted = _digits(space) if space is not None else ""
    matched: set[bytes] = set()
    for entry in catalogue.entries():
        if entry.space.hex().startswith(wanted) and digest in (None, entry.tenant):
            matched.add(entry.space)
            if wanted and len(matched) > 1:
                raise ConfigError(f"several spaces begin with {wanted}; give more digits (see kvboost cache stat)")
            yield entry
    if wanted and not matched:
        raise ConfigError(f"no space begins with {wanted}; see kvboost cache stat {catalogue.place}")


def _digits(prefix: str) -> str:
    lower = prefix.lower()
    if len(lower) < _MIN_DIGITS or any(letter not in "0123456789abcdef" for letter in lower):
        raise ConfigError(f"{prefix!r} is no beginning of a digest; give {_MIN_DIGITS} hexadecimal digits or more")
    return lower


def read_key_files(files: Sequence[Path] | None) -> KeyRing:
    """The keys in these files, which are as an engine's ``record_key_file`` must be."""
    from kvboost.store.admin.base import KeyRing
    from kvboost.store.record.format import read_key

    try:
        return KeyRing([read_key(file) for file in files or ()])
    except ConfigError as error:
        raise ConfigError(str(error).replace("record_key_file", "--key-file")) from error


def confirm(question: str, yes: bool) -> None:
    """Ask, unless ``yes``. Raises typer.Abort for a no, ConfigError where nobody can answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to answer on; give --yes")
    if not typer.confirm(question, err=True):
        raise typer.Abort


def parse_header(entry: Entry, head: bytes | None) -> RecordHeader | None:
    """What a record's header says; None if it cannot be read or is of another record."""
    from kvboost.store.admin.base import examine

    return None if head is None else examine(head, space=entry.space, key=entry.key).header


def header_fields(header: RecordHeader | None) -> dict[str, Any]:
    """What all records of a space have in common."""
    if header is None:
        return {}
    runs = ", ".join(f"{run.count} x {str(run.dtype).removeprefix('torch.')}" for run in header.runs)
    return {
        "model": header.namespace.root.hex(),
        "tenant": header.namespace.tenant.hex(),
        "codec": header.codec,
        "tensors": runs,
        "sealed": header.keyed,
        "encrypted": header.encrypted,
    }


def tenant_name(digest: str | None) -> str:
    """The beginning of a tenant's digest, which does not tell its name; "-" for none."""
    if digest is None:
        return "?"
    return "-" if digest == tenant_digest("").hex() else digest[:8]


def to_hex(digest: bytes | None) -> str | None:
    """A digest as text."""
    return None if digest is None else digest.hex()


def iso_time(seconds: float | None) -> str | None:
    """A time as scripts read it."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def console() -> Console:
    """A console that is wide enough for tables where there is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=200)
