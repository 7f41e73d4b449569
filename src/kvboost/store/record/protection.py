"""The key that protects records: read from a file, and made into the keys of one tenant.

Used where tiers are opened. Invariant: a key that others can read is refused; no two tenants, and no two purposes,
have a key in common.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from pathlib import Path

from kvboost.errors import ConfigError
from kvboost.store.record.format import RecordFormat
from kvboost.types import Namespace

_KEY_BYTES = 32
_MAX_BYTES = 4096  # of the file: enough for a key, not for a mistake


def read_key(file: str | Path) -> bytes:
    """The 32 bytes in ``file``, raw or as 64 hex digits. Raises ConfigError for anything else, never with the key."""
    path = Path(file).expanduser()
    make = "make one with: (umask 077; head -c 32 /dev/urandom > FILE)"
    try:
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            data = opened.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"record_key_file={str(file)!r} cannot be read ({error.strerror}); {make}") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"record_key_file={str(file)!r} is open to other users; chmod 600 it, or make a new key")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"record_key_file={str(file)!r} belongs to another user; use one of your own")
    if re.fullmatch(rb"[0-9a-fA-F]{32}", data):
        raise ConfigError(f"record_key_file={str(file)!r} holds 32 hex digits, which are 16 bytes; {make}")
    if len(data) == _KEY_BYTES:
        return data
    if re.fullmatch(rb"\s*[0-9a-fA-F]{64}\s*", data):
        return bytes.fromhex(data.decode("ascii").strip())
    raise ConfigError(f"record_key_file={str(file)!r} holds neither 32 bytes nor 64 hex digits; {make}")


def record_format(
    namespace: Namespace, *, codec: str, max_bytes: int, protection: str = "none", key: bytes | None = None
) -> RecordFormat:
    """The format of one tenant's records, ``protection`` as in the engine's settings, with keys of the tenant's own."""
    if protection == "none":
        return RecordFormat(namespace, codec=codec, max_bytes=max_bytes)
    if key is None:
        raise ConfigError(f"record_protection={protection!r} needs a key; give record_key_file")
    return RecordFormat(
        namespace,
        codec=codec,
        max_bytes=max_bytes,
        mac_key=_derived(key, b"kvboost.mac.1", namespace),  # also of encrypted ones: headers are read alone at times
        encryption_key=_derived(key, b"kvboost.encryption.1", namespace) if protection == "encrypt" else None,
    )


def _derived(key: bytes, purpose: bytes, namespace: Namespace) -> bytes:
    return hmac.digest(key, purpose + namespace.tenant, "sha256")
