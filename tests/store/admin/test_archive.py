"""Archives: what was written comes back, whatever happens to the bytes between."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.store.admin import ArchiveReader, ArchiveWriter, KeyRing, Verdict, check
from kvboost.store.record.format import RecordFormat, space_of
from kvboost.testing.blocks import namespace
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


@pytest.mark.parametrize("stream", [io.BytesIO, Pipe])
def test_what_is_written_is_read(stream: Any) -> None:
    data = archive(RAW[:4]) + archive([]) + archive(RAW[4:])  # joined as with cat
    reader = ArchiveReader(stream(data))
    assert whole_keys(reader) == KEYS
    assert (reader.complete, reader.damaged, reader.position) == (True, 0, len(data))
    skipping = ArchiveReader(stream(data))
    assert whole_keys(skipping, take=lambda number: number % 2) == KEYS[1::2]
    assert (skipping.complete, skipping.position) == (True, len(data))


@pytest.mark.parametrize("stream", [io.BytesIO, Pipe])
@pytest.mark.parametrize("take", [True, False])
@pytest.mark.parametrize("cut", [1, 100, 4096, 4097, 8192, 13_000, 12_288])
def test_an_archive_that_was_cut_short_says_so(stream: Any, take: bool, cut: int) -> None:
    reader = ArchiveReader(stream(archive(RAW)[:-cut]))
    found = whole_keys(reader, take=lambda _: take)
    assert not reader.complete
    assert found == (KEYS[: len(found)] if take else [])
    assert len(found) >= 4 or not take


@pytest.mark.parametrize("stream", [io.BytesIO, Pipe])
def test_reading_goes_on_behind_damage(stream: Any) -> None:
    data = bytearray(archive(RAW))
    each = (len(data) - 4096) // len(RAW)
    data[each + 100] ^= 1  # the second's header
    data[3 * each + 5000] ^= 1  # the fourth's body
    reader = ArchiveReader(stream(bytes(data)))
    assert whole_keys(reader) == [KEYS[0], KEYS[2], KEYS[4], KEYS[5]]
    assert (reader.damaged, reader.complete) == (1, False)


def test_a_header_that_claims_more_pages_takes_no_record_with_it() -> None:
    data = bytearray(archive(RAW))
    data[12:16] = (2**20).to_bytes(4, "little")  # the first's length of its header: all that follows
    reader = ArchiveReader(io.BytesIO(bytes(data)))
    assert whole_keys(reader) == KEYS[1:]
    assert reader.damaged == 1
    assert reader.position == len(data)


def test_a_record_of_another_version_is_passed_over() -> None:
    other = bytearray(RAW[1])
    other[8] = 9
    reader = ArchiveReader(io.BytesIO(archive([RAW[0], bytes(other), RAW[2]])))
    assert whole_keys(reader) == [KEYS[0], KEYS[2]]
    assert (reader.other_version, reader.damaged, reader.complete) == (1, 0, True)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_damage_gets_through(data: st.DataObject) -> None:
    """Flips, cuts, joins and swaps of pages: what passes is exactly what was written, and loss does not go unsaid."""
    records = RAW + KEYED_RAW
    raw = bytearray(archive(records))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    for kind in data.draw(st.lists(st.sampled_from(["flip", "cut", "drop", "swap", "noise"]), min_size=1, max_size=3)):
        pages = len(raw) // 4096
        if kind == "flip":
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del raw[rng.randrange(1, len(raw)) :]
        elif kind == "noise":
            at = rng.randrange(len(raw))
            raw[at : at + 64] = rng.randbytes(min(64, len(raw) - at))
        elif pages > 1:
            one, two = sorted(rng.sample(range(pages), 2))
            if kind == "drop":
                del raw[one * 4096 : two * 4096]
            else:
                first, second = raw[one * 4096 : one * 4096 + 4096], raw[two * 4096 : two * 4096 + 4096]
                raw[one * 4096 : one * 4096 + 4096], raw[two * 4096 : two * 4096 + 4096] = second, first
    written = {block.key for block in blocks_of(*"abcdef", nbytes=6000)} | {b.key for b in blocks_of(*"ghi")}
    reader = ArchiveReader(io.BytesIO(bytes(raw)))
    found = whole_keys(reader)
    assert set(found) <= written
    piped = ArchiveReader(Pipe(bytes(raw)))
    assert whole_keys(piped) == found
    assert (piped.damaged, piped.complete, piped.position) == (reader.damaged, reader.complete, reader.position)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=20_000))
def test_any_bytes_are_read_to_their_end(raw: bytes) -> None:
    reader = ArchiveReader(io.BytesIO(raw))
    assert whole_keys(reader) == []
    assert reader.position == len(raw)
