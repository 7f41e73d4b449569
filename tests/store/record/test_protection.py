"""The key file and what is made of it: one clear error for each mistake, and no key in common."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvboost.errors import ConfigError, ForeignRecordError
from kvboost.store import read_key, record_format
from kvboost.store.record.format import RecordFormat
from kvboost.types import Namespace
from tests.contracts.blocks import assert_same, block_of, namespace
from tests.contracts.content import prompt

KEY = bytes(range(100, 132))


def key_file(folder: Path, content: bytes, *, mode: int = 0o600) -> Path:
    file = folder / "key"
    file.write_bytes(content)
    file.chmod(mode)
    return file


@pytest.mark.parametrize("content", [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n"])
def test_a_key_is_raw_or_hex(content: bytes, tmp_path: Path) -> None:
    assert read_key(key_file(tmp_path, content)) == KEY


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (KEY, 0o640, "chmod 600"),
        (KEY, 0o604, "chmod 600"),
        (b"", 0o600, "neither 32 bytes nor 64 hex digits"),
        (KEY + b"\n", 0o600, "neither 32 bytes nor 64 hex digits"),
        (KEY[:-1], 0o600, "neither 32 bytes nor 64 hex digits"),
        (KEY.hex().encode() + b"00", 0o600, "neither 32 bytes nor 64 hex digits"),
        (KEY[:16].hex().encode(), 0o600, "32 hex digits, which are 16 bytes"),
    ],
)
def test_a_bad_key_file_is_one_clear_error(content: bytes, mode: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^record_key_file=.*{said}") as raised:
        read_key(key_file(tmp_path, content, mode=mode))
    assert len(content) < 8 or repr(content)[2:10] not in str(raised.value), "the key is told"


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=r"^record_key_file=.*cannot be read"):
            read_key(path)


def test_another_users_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = key_file(tmp_path, KEY)
    if file.stat().st_uid == 0:
        os.chown(file, 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(ConfigError, match="another user"):
        read_key(file)


def _format(of: Namespace, protection: str, key: bytes | None = KEY) -> RecordFormat:
    return record_format(of, codec="raw", max_bytes=10**6, protection=protection, key=key)


@pytest.mark.parametrize("protection", ["none", "mac", "encrypt"])
def test_what_was_written_so_is_read_so_and_not_otherwise(protection: str) -> None:
    block = block_of(prompt("a")[0])
    record = _format(namespace(), protection).encode(block).join()
    assert_same(_format(namespace(), protection).decode(record, block.key), block)
    assert (bytes(block.tensors[0].numpy().tobytes()) in record) == (protection != "encrypt")
    for other in {"none", "mac", "encrypt"} - {protection}:
        with pytest.raises(ForeignRecordError):
            _format(namespace(), other).decode(record, block.key)
    if protection != "none":
        with pytest.raises(ForeignRecordError):
            _format(namespace(), protection, bytes(32)).decode(record, block.key)


@pytest.mark.parametrize("protection", ["mac", "encrypt"])
def test_no_tenant_and_no_purpose_shares_a_key(protection: str) -> None:
    formats = [_format(namespace(tenant=tenant), protection) for tenant in ("one", "other")]
    keys = {f._mac_key for f in formats}
    assert len(keys) == 2
    assert KEY not in keys
    assert len({f._secrets_id for f in formats}) == 2
    assert len({f.space for f in formats}) == 2


def test_protection_without_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a key"):
        _format(namespace(), "mac", None)
