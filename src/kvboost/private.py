"""Files that only their owner may use: keys and secrets.

Used where a key file is read. Invariants: a file that others can read, or that another user owns, is refused with what
to do; no message holds what is in a file.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import stat
from contextlib import suppress
from pathlib import Path

from kvboost.errors import ConfigError

SECRET_BYTES = 32
_MAX_BYTES = 2**20  # of a file: enough for many keys, not for a mistake
_MAKE = "make one with: (umask 077; head -c 32 /dev/urandom > FILE)"


def read_private(file: str | Path, *, name: str, remedy: str) -> bytes:
    """The bytes of a file. ``name`` is how the user gave it. Raises ConfigError, with ``remedy`` if it is not there."""
    path = Path(file).expanduser()
    try:
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            data = opened.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{name}={str(file)!r} cannot be read ({error.strerror}); {remedy}") from error
    # Secrets that an orchestrator mounts belong to root, and to a group of ours that may read them.
    others = 0o037 if status.st_uid == 0 != os.geteuid() else 0o077
    if stat.S_IMODE(status.st_mode) & others:
        command = f"chmod 600 {shlex.quote(str(file))}"
        raise ConfigError(f"{name}={str(file)!r} is open to other users; run: {command} (or make a new one)")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{name}={str(file)!r} belongs to another user; use one of your own")
    return data


def read_secret(file: str | Path, *, name: str) -> bytes:
    """The 32 bytes in ``file``, raw or as 64 hex digits. Raises ConfigError for anything else, never with the key."""
    data = read_private(file, name=name, remedy=_MAKE)
    if re.fullmatch(rb"[0-9a-fA-F]{32}", data):
        raise ConfigError(f"{name}={str(file)!r} holds 32 hex digits, which are 16 bytes; {_MAKE}")
    if len(data) == SECRET_BYTES:
        return data
    if re.fullmatch(rb"\s*[0-9a-fA-F]{64}\s*", data):
        return bytes.fromhex(data.decode("ascii").strip())
    raise ConfigError(f"{name}={str(file)!r} holds neither 32 bytes nor 64 hex digits; {_MAKE}")


def make_secret(file: Path) -> None:
    """Write a new secret for this user alone, unless the file is there. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(SECRET_BYTES).hex().encode() + b"\n")
        with suppress(FileExistsError):  # another process was first
            os.link(part, file)
    finally:
        part.unlink()
