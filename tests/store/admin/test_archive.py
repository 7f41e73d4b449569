"""Archives: what was written comes back, whatever happens to the bytes between."""

from __future__ import annotations

import io
import random
import tarfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.store.admin.archive import ArchiveReader, ArchiveWriter
from kvboost.store.admin.base import KeyRing, Verdict, check
from kvboost.store.record.format import RecordFormat, space_of
from tests.contracts.blocks import namespace
from tests.helpers.places import blocks_of

RECORDS = RecordFormat(namespace())
KEYED = RecordFormat(namespace(), mac_key=b"m" * 32)
RAW = [RECORDS.encode(block).join() for block in blocks_of(*"abcdef", nbytes=6000)]
KEYED_RAW = [KEYED.encode(block).join() for block in blocks_of(*"ghi")]


class Pipe(io.RawIOBase):
    """Cannot seek, and gives little at a time."""

    def __init__(self, data: bytes) -> None:
        self._inner = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        return self._inner.readinto(memoryview(into)[:1777])


def archive(records: list[bytes]) -> bytes:
    stream = io.BytesIO()
    writer = ArchiveWriter(stream)
    for record in records:
        writer.add(record)
    writer.finish()
    return stream.getvalue()


def whole_keys(reader: ArchiveReader, *, take: Any = lambda _: True) -> list[bytes]:
    """The keys of records that pass their checks; those not taken are passed over."""
    ring, found = KeyRing([b"m" * 32]), []
    for number, header in enumerate(reader):
        if take(number):
            finding = check(reader.record(), space=space_of(header), key=header.key, keys=ring)
            if finding.verdict is Verdict.WHOLE:
                found.append(header.key)
    return found


KEYS = [block.key for block in blocks_of(*"abcdef")]


EACH = 512 + -(-len(RAW[0]) // 512) * 512  # of a member


@pytest.mark.parametrize("stream", [io.BytesIO, Pipe])
def test_what_is_written_is_read(stream: Any) -> None:
    data = archive(RAW[:4]) + archive([]) + archive(RAW[4:])  # joined as with cat
    reader = ArchiveReader(stream(data))
    assert whole_keys(reader) == KEYS
    assert (reader.complete, reader.damaged) == (True, 0)
    skipping = ArchiveReader(stream(data))
    assert whole_keys(skipping, take=lambda number: number % 2) == KEYS[1::2]
    assert skipping.complete


def test_it_is_a_tar_file() -> None:
    with tarfile.open(fileobj=io.BytesIO(archive(RAW))) as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == [
            *(f"{RECORDS.space.hex()}/{key.hex()}.kv" for key in KEYS),
            "COUNT",
        ]
        taken = [tar.extractfile(member) for member in members]
        assert [file.read() for file in taken if file is not None] == [*RAW, b"6"]


@pytest.mark.parametrize("stream", [io.BytesIO, Pipe])
@pytest.mark.parametrize("take", [True, False])
@pytest.mark.parametrize("cut", [1025, 1100, 1536, 2048, 4097, EACH, EACH + 2048])
def test_an_archive_that_was_cut_short_says_so(stream: Any, take: bool, cut: int) -> None:
    reader = ArchiveReader(stream(archive(RAW)[:-cut]))
    found = whole_keys(reader, take=lambda _: take)
    assert reader.complete == (cut < 1536)  # of the end mark and the count's padding nothing is missed
    assert found == (KEYS[: len(found)] if take else [])
    assert len(found) >= 4 or not take


def test_nothing_is_no_archive() -> None:
    reader = ArchiveReader(io.BytesIO())
    assert whole_keys(reader) == []
    assert not reader.complete


@pytest.mark.parametrize("stream", [io.BytesIO, Pipe])
def test_reading_goes_on_behind_damage(stream: Any) -> None:
    data = bytearray(archive(RAW))
    data[EACH + 10] ^= 1  # the second's name
    data[2 * EACH + 512 + 100] ^= 1  # the third's own header
    data[3 * EACH + 5512] ^= 1  # the fourth's body
    reader = ArchiveReader(stream(bytes(data)))
    assert whole_keys(reader) == [KEYS[0], KEYS[4], KEYS[5]]
    assert (reader.damaged, reader.complete) == (2, False)


def test_a_header_that_claims_more_pages_takes_no_record_with_it() -> None:
    data = bytearray(archive(RAW))
    data[512 + 12 : 512 + 16] = (2**20).to_bytes(4, "little")  # the first's length of its header: all that follows
    reader = ArchiveReader(io.BytesIO(bytes(data)))
    assert whole_keys(reader) == KEYS[1:]
    assert reader.damaged == 1


def test_a_record_of_another_version_is_passed_over() -> None:
    first, second, third = (archive([raw])[:EACH] for raw in RAW[:3])
    other = bytearray(second)
    other[512 + 8] = 9
    count = archive(RAW[:3])[3 * EACH :]
    reader = ArchiveReader(io.BytesIO(first + bytes(other) + third + count))
    assert whole_keys(reader) == [KEYS[0], KEYS[2]]
    assert (reader.other_version, reader.damaged, reader.complete) == (1, 0, True)


def _foreign(**fields: Any) -> bytes:
    member = tarfile.TarInfo("../../etc/passwd")
    for name, value in fields.items():
        setattr(member, name, value)
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("stream", [io.BytesIO, Pipe])
@pytest.mark.parametrize(
    "foreign",
    [
        _foreign(size=1000) + bytes(1024),
        _foreign(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        _foreign(type=tarfile.XHDTYPE, size=2**40),
        _foreign(type=tarfile.GNUTYPE_LONGNAME, size=2**40),
        _foreign(size=2**40),
        archive(RAW[5:])[:100].replace(b"/", b"-", 1).ljust(512, b"x"),
    ],
    ids=["file", "link", "extended header", "long name", "endless", "broken"],
)
def test_a_foreign_member_is_counted_and_skipped(stream: Any, foreign: bytes) -> None:
    whole = archive(RAW)
    reader = ArchiveReader(stream(whole[:EACH] + foreign + whole[EACH:]))
    assert whole_keys(reader) == KEYS
    assert (reader.damaged, reader.complete) == (1, True)


def test_a_record_under_another_name_is_damaged() -> None:
    whole = archive(RAW)
    swapped = whole[:512] + whole[EACH + 512 : 2 * EACH] + whole[EACH:]
    reader = ArchiveReader(io.BytesIO(swapped))
    assert whole_keys(reader) == KEYS[1:]
    assert (reader.damaged, reader.complete) == (1, False)


def test_directories_of_a_repacked_archive_are_nothing() -> None:
    directory = _foreign(type=tarfile.DIRTYPE)
    reader = ArchiveReader(io.BytesIO(directory + archive(RAW)))
    assert whole_keys(reader) == KEYS
    assert (reader.damaged, reader.complete) == (0, True)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_damage_gets_through(data: st.DataObject) -> None:
    """Flips, cuts, joins and swaps of blocks: what passes is exactly what was written, and loss does not go unsaid."""
    records = RAW + KEYED_RAW
    raw = bytearray(archive(records))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    for kind in data.draw(st.lists(st.sampled_from(["flip", "cut", "drop", "swap", "noise"]), min_size=1, max_size=3)):
        blocks = len(raw) // 512
        if kind == "flip":
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del raw[rng.randrange(1, len(raw)) :]
        elif kind == "noise":
            at = rng.randrange(len(raw))
            raw[at : at + 64] = rng.randbytes(min(64, len(raw) - at))
        elif blocks > 1:
            one, two = sorted(rng.sample(range(blocks), 2))
            if kind == "drop":
                del raw[one * 512 : two * 512]
            else:
                first, second = raw[one * 512 : one * 512 + 512], raw[two * 512 : two * 512 + 512]
                raw[one * 512 : one * 512 + 512], raw[two * 512 : two * 512 + 512] = second, first
    written = {block.key for block in blocks_of(*"abcdef", nbytes=6000)} | {b.key for b in blocks_of(*"ghi")}
    reader = ArchiveReader(io.BytesIO(bytes(raw)))
    found = whole_keys(reader)
    assert set(found) <= written
    piped = ArchiveReader(Pipe(bytes(raw)))
    assert whole_keys(piped) == found
    assert (piped.damaged, piped.complete) == (reader.damaged, reader.complete)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=20_000))
def test_any_bytes_are_read_to_their_end(raw: bytes) -> None:
    reader = ArchiveReader(io.BytesIO(raw))
    assert whole_keys(reader) == []
    assert not reader.complete
