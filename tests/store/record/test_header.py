"""Records keep their bytes from one version of the code to the next, and limits are where they are said to be."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvboost.errors import ConfigError, DamagedRecordError, RecordError
from kvboost.store import record_format
from kvboost.store.record.format import RecordFormat, inspect
from kvboost.store.record.header import MAGIC, MAX_HEADER_BYTES, PAGE, aligned, header_length, read_header, seal_of
from kvboost.types import Namespace
from tests.store.record.test_format import BOTH, HONEST, KEYED, NAMESPACE, PLAIN, assert_equal, block, digest, resealed

_FULL = block(parent_key=digest("parent"), bitwise=False, start=3, context=b"context", approx_depth=2)


@pytest.mark.parametrize(
    ("form", "space", "record"),
    [
        (PLAIN, "80ec717ff0c69e2f70b52246c6ddfc3c", "b45277fa7f1123cced27d991f874ad5395a5fea0c14179961db948eb287da0e3"),
        (KEYED, "179447b3527716813c97af44cfae2c21", "aac764e46a6b0774ac29e285b6f9f62a372069266efe3152f26e97932c1cfb25"),
        (
            record_format(NAMESPACE, codec="raw", max_bytes=10**6, protection="mac", key=b"k" * 32),
            "7b3085f605b462670a8fc389629b80f2",
            "660afd5c6107e52853d956c26a12021b014d2a110f3a3d6cd3dcdcce4e14e8d6",
        ),
    ],
    ids=["plain", "keyed", "of a tenant"],
)
def test_what_was_written_by_earlier_code_is_still_read(form: RecordFormat, space: str, record: str) -> None:
    """Other bytes would need another version: every stored record would be lost, or taken for damaged."""
    assert form.space.hex() == space
    assert hashlib.sha256(form.encode(_FULL).join()).hexdigest() == record


def test_the_keys_of_encrypted_records_stay_the_same() -> None:
    form = record_format(NAMESPACE, codec="raw", max_bytes=10**6, protection="encrypt", key=b"k" * 32)
    assert form.space.hex() == "f34fd15eb178c0490803e2c4151522c4"
    assert BOTH.space.hex() == "78c0bb111348536fe16751bc01b73916"


def test_every_field_of_a_header_is_read_from_its_place() -> None:
    header = inspect(PLAIN.encode(_FULL).join())
    assert (header.version, header.header_bytes, header.keyed, header.encrypted) == (1, PAGE, False, False)
    assert (header.key, header.parent_key, header.content_key) == (_FULL.key, _FULL.parent_key, _FULL.content_key)
    assert (header.secrets_id, header.token_bytes, header.nbytes) == (bytes(8), 8, 34)
    assert [(run.count, run.offset, run.stride) for run in header.runs] == [(1, 64, 64), (1, 128, 64)]
    assert (inspect(BOTH.encode(_FULL).join()[:PAGE]).keyed, inspect(BOTH.encode(_FULL).join()).encrypted) == (
        True,
        True,
    )


def test_a_header_is_read_alone_and_a_broken_one_is_not() -> None:
    assert inspect(HONEST[:PAGE]).record_bytes == len(HONEST)
    broken = bytearray(HONEST[:PAGE])
    broken[PAGE - 1] ^= 1  # in the padding: only the checksum tells
    with pytest.raises(DamagedRecordError, match="checksum"):
        inspect(broken)
    with pytest.raises(DamagedRecordError, match=r"a record of 4288 bytes .* 4287 allowed"):
        inspect(HONEST, max_bytes=len(HONEST) - 1)
    assert inspect(HONEST, max_bytes=len(HONEST)).key == digest("a")


@pytest.mark.parametrize("shape", [memoryview(HONEST).cast("c"), memoryview(HONEST).cast("B", (len(HONEST) // 64, 64))])
def test_any_buffer_of_single_bytes_can_be_read(shape: memoryview) -> None:
    assert_equal(PLAIN.decode(shape, digest("a")), block())


def test_a_buffer_of_numbers_is_read_as_bytes() -> None:
    assert_equal(PLAIN.decode(memoryview(array("I", HONEST)), digest("a")), block())


@pytest.mark.parametrize(
    "fits",
    [
        {"context": b"c" * (2**16 - 1)},
        {"approx_depth": 2**32 - 1},
        {"start": 2**63 - 1},
        {"tensors": (torch.ones((1,) * 8),)},
        {"tensors": (torch.empty(0),) * 4096},
    ],
    ids=str,
)
def test_the_largest_of_everything_is_written_and_read(fits: dict[str, Any]) -> None:
    original = block(**fits)
    assert_equal(PLAIN.decode(PLAIN.encode(original).join(), original.key), original)


@pytest.mark.parametrize("unfit", [{"approx_depth": 2**32}, {"start": 2**63}, {"context": b"c" * 2**16}], ids=str)
def test_one_more_is_not_written(unfit: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="cannot be written"):
        PLAIN.encode(block(**unfit))


@pytest.mark.parametrize("encryption_key", [None, b"e" * 32])
def test_a_record_of_exactly_the_limit_is_written_and_read(encryption_key: bytes | None) -> None:
    size = RecordFormat(NAMESPACE, encryption_key=encryption_key).size_of(block())
    form = RecordFormat(NAMESPACE, encryption_key=encryption_key, max_bytes=size)
    assert_equal(form.decode(form.encode(block()).join(), digest("a")), block())
    with pytest.raises(RecordError, match="smaller chunks"):
        RecordFormat(NAMESPACE, encryption_key=encryption_key, max_bytes=size - 1).encode(block())


def test_a_header_has_at_most_a_megabyte() -> None:
    assert header_length(MAGIC + bytes(4) + MAX_HEADER_BYTES.to_bytes(4, "little") + bytes(PAGE)) == MAX_HEADER_BYTES
    for length in (0, MAX_HEADER_BYTES + 1):
        with pytest.raises(DamagedRecordError, match=f"cannot have {length} bytes"):
            header_length(MAGIC + bytes(4) + length.to_bytes(4, "little") + bytes(PAGE))


def test_bytes_shorter_than_the_fixed_fields_do_not_begin_a_record() -> None:
    with pytest.raises(DamagedRecordError, match="begin"):
        header_length(HONEST[:277])
    assert header_length(HONEST[:278]) == PAGE
    with pytest.raises(DamagedRecordError, match="278 bytes of a header"):
        read_header(memoryview(HONEST)[:278], 10**6)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (10, b"\x10", "flags"),
        (16, (PAGE - 1).to_bytes(8, "little"), "allowed"),
        (274, (2**15).to_bytes(2, "little"), "shorter"),
        (278, b"\xff", "readable"),
        (281, bytes(2), "kind or number"),  # no tensor at all
        (283, b"\x09", "kind or number"),  # one more than there are dtypes
        (284, b"\x09", "kind or number"),  # one dimension more than there may be
        (
            12,
            (2 * PAGE).to_bytes(4, "little") + (len(HONEST) + PAGE).to_bytes(8, "little"),
            "another length than its fields",
        ),
        (268, (100).to_bytes(4, "little"), "another length than its tokens"),
    ],
)
def test_a_lie_is_named(at: int, value: bytes, said: str) -> None:
    data = HONEST + bytes(PAGE)
    with pytest.raises(DamagedRecordError, match=said):
        PLAIN.decode(resealed(data, at, value), digest("a"))


def test_keys_and_names_of_the_shortest_and_longest_are_taken() -> None:
    RecordFormat(NAMESPACE, mac_key=b"k" * 16)
    with pytest.raises(ConfigError, match="15 bytes"):
        RecordFormat(NAMESPACE, mac_key=b"k" * 15)
    long = RecordFormat(NAMESPACE, codec="x" * 255)
    assert inspect(long.encode(block()).join()).codec == "x" * 255
    with pytest.raises(ConfigError, match="SHA-256"):
        RecordFormat(Namespace(NAMESPACE.root, b"short"))
    with pytest.raises(ConfigError, match="32 bytes, not 31"):
        RecordFormat(NAMESPACE, encryption_key=b"e" * 31)


def test_the_seal_covers_everything_but_itself() -> None:
    header = bytearray(HONEST[:PAGE])
    seal = seal_of(header, None)
    header[24:56] = bytes(32)
    assert seal_of(header, None) == seal
    for at in (0, 23, 56, PAGE - 1):
        changed = bytearray(header)
        changed[at] ^= 1
        assert seal_of(changed, None) != seal
    assert seal_of(header, b"k" * 32) != seal


def test_multiples_are_their_own_next() -> None:
    assert [aligned(count, 64) for count in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_the_body_is_what_the_header_is_about() -> None:
    """Two records of one key: the header of one does not read the other's body, also without a MAC key."""
    one, two = (PLAIN.encode(replace(block(), tokens=tokens)).join() for tokens in (b"12345678", b"87654321"))
    with pytest.raises(DamagedRecordError, match="checksum"):
        PLAIN.decode(one[:PAGE] + two[PAGE:], digest("a"))
