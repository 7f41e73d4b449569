"""The key that protects records: read from a file, and made into the keys of one tenant.

Used where tiers are opened. Invariant: no two tenants, and no two purposes, have a key in common.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from kvboost.errors import ConfigError
from kvboost.private import read_secret
from kvboost.store.record.format import RecordFormat
from kvboost.types import Namespace


def read_key(file: str | Path) -> bytes:
    """The 32 bytes in ``file``, raw or as 64 hex digits. Raises ConfigError for anything else, never with the key."""
    return read_secret(file, name="record_key_file")


def key_salt(file: str | Path | None) -> str:
    """The secret that the keys of protected records are derived with; empty without a key file.

    Names and headers hold those keys in the clear. Who could compute them could try guesses of a text on them.
    """
    return "" if file is None else hmac.digest(read_key(file), b"kvboost.salt.1", "sha256").hex()


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
