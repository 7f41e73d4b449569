"""Reads files of keys. A line is a key, or ``NAME: KEY``; keys have no spaces, so nothing else looks like it.

Used by :class:`kvboost.serve.security.auth.Keys`. Invariant: no message holds a key.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from kvboost.errors import ConfigError
from kvboost.private import read_private


class KeyFiles(NamedTuple):
    """Where the keys of a server are."""

    api_keys: str | Path | None
    admin_key: str | Path | None


_MIN_LENGTH = 8
_LINE = re.compile(r"(?:([\w.@-]{1,64}):\s+)?(\S+)")


def read_keys(file: str | Path | None, *, name: str) -> list[tuple[str | None, str]]:
    """The keys of a file, each with the name of its tenant, if it has one. ``name`` is the setting of the file."""
    if file is None:
        return []
    remedy = "give a text file with one key per line"
    try:
        lines = read_private(file, name=name, remedy=remedy).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text ({error}); {remedy}") from error
    keys: list[tuple[str | None, str]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise ConfigError(f"line {number} of {file} is neither a key nor 'NAME: KEY'; write one key per line")
        check_key(found[2], called=f"the key in line {number} of {file}")
        keys.append((found[1], found[2]))
    if not keys:
        raise ConfigError(f"{file} holds no key; write one per line, for example from `openssl rand -hex 32`")
    return keys


def check_key(key: str, *, called: str = "a key") -> None:
    """Refuse one that can be guessed, or that no header carries. ``called`` says which it is."""
    if len(key) < _MIN_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{called} needs {_MIN_LENGTH} or more printable ASCII characters without spaces; "
            "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
