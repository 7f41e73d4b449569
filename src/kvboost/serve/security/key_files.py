"""Reads files of keys. A line is a key, or ``NAME: KEY``; keys have no spaces, so nothing else looks like it.

Used by :class:`kvboost.serve.security.auth.Keys`, which checks the keys themselves. Invariant: no message holds a key.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvboost.errors import ConfigError

KeyFiles = tuple[str | Path | None, str | Path | None]
"""Of the API keys and of the admin's."""
_LINE = re.compile(r"(?:([\w.@-]{1,64}):\s+)?(\S+)")


def read_keys(file: str | Path | None) -> list[tuple[str | None, str]]:
    """The keys of a file, each with the name of its tenant, if it has one. Raises ConfigError."""
    if file is None:
        return []
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give a text file with one key per line") from error
    keys: list[tuple[str | None, str]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise ConfigError(f"line {number} of {file} is neither a key nor 'NAME: KEY'; write one key per line")
        keys.append((found[1], found[2]))
    if not keys:
        raise ConfigError(f"{file} holds no key; write one per line, for example from `openssl rand -hex 32`")
    return keys
