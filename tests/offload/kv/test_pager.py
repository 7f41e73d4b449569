from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.direct_io import PAGE
from kvboost.errors import CapacityError, KVBoostError
from kvboost.offload.kv.pager import TRANSIT, FileSpill, HostSpill, Pager, Spill
from tests.helpers.devices import Devices, host
from tests.helpers.late_devices import LateDevices


def pager(spill: Spill | None = None, *, frames: int = 4, group: int = 1) -> Pager:
    return Pager(spill or FileSpill(None), frame_bytes=PAGE, budget=PAGE * frames, group=group)


def filled(of: Pager, number: int) -> torch.Tensor:
    frame = of.new_frame()
    frame.copy_(content(number))
    return frame


def content(number: int) -> torch.Tensor:
    return torch.randint(0, 256, (PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("kind", ["file", "host"])
@given(
    group=st.integers(1, 4),
    moves=st.lists(st.tuples(st.sampled_from(["write", "read", "guess"]), st.integers(0, 10**6)), max_size=40),
)
@settings(max_examples=40, deadline=None)
def test_pages_read_back_as_they_were_written_within_the_budget(
    kind: str, group: int, moves: list[tuple[str, int]]
) -> None:
    spill = FileSpill(None) if kind == "file" else HostSpill(torch.device("cpu"))
    made = pager(spill, frames=1 + TRANSIT * group, group=group)
    away: dict[int, int] = {}  # slot: content
    frame = made.new_frame()
    for number, (move, choice) in enumerate(moves):
        slots = sorted(away, key=lambda slot: (slot * 7919 + choice) % 101)
        if move == "write":
            frame.copy_(content(number))
            slot = made.write(frame, owner=choice % 3)
            frame.fill_(7)  # it is free again at once
            assert slot not in away
            away[slot] = number
        else:
            guess = list(reversed(slots)) if move == "guess" else slots  # what is read ahead may be the wrong thing
            made.expect(guess)
            found = [page for pages in made.read(slots, then=guess) for page in pages.clone()]
            assert len(found) == len(slots)
            for slot, page in zip(slots, found, strict=True):
                assert torch.equal(page, content(away[slot]))
        assert made.ledger.used <= made.ledger.peak <= made.ledger.limit
    made.close()
    assert made.ledger.used == 0


def test_nothing_is_given_out_beyond_the_budget() -> None:
    made = pager(frames=2)
    made.new_frame()
    made.new_frame()
    with pytest.raises(CapacityError, match="kv_bytes"):
        made.new_frame()
    assert made.ledger.peak == 2 * PAGE
    made.close()


class SlowSpill(FileSpill):
    """Lets the test see when a page is read."""

    def __init__(self) -> None:
        super().__init__(None)
        self.begun: list[int] = []
        self.may_read = threading.Semaphore(0)
        self.began = threading.Semaphore(0)

    def read(self, slots: Sequence[int], pages: torch.Tensor, after: Any) -> None:
        self.begun.extend(slots)
        self.began.release()
        assert self.may_read.acquire(timeout=10)
        super().read(slots, pages, after)


def test_the_next_page_is_read_while_one_is_used() -> None:
    spill = SlowSpill()
    made = pager(spill, frames=1 + TRANSIT)
    frame, slots = made.new_frame(), []
    for number in range(3):
        frame.copy_(content(number))
        slots.append(made.write(frame, owner=0))
    spill.may_read.release()
    pages = made.read(slots, then=slots[:1])
    first = next(pages)
    for _ in range(2):
        assert spill.began.acquire(timeout=10)  # the second one has begun though nobody asked for it yet
    assert spill.begun == slots[:2]
    assert torch.equal(first[0], content(0))
    spill.may_read.release(10)
    assert [torch.equal(page[0], content(n)) for n, page in enumerate(pages, 1)] == [True, True]
    for _ in range(2):
        assert spill.began.acquire(timeout=10)
    assert spill.begun == [*slots, slots[0]]  # and what comes next
    made.close()


def test_a_page_that_could_not_be_written_raises_and_is_never_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    made = pager()
    frame = filled(made, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match="No space"):
            made.write(frame, owner=0)
    with pytest.raises(KVBoostError, match="make a new cache"):
        list(made.read([0]))
    made.close()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_a_move_ends_the_sequence(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    made = pager()
    slot = made.write(filled(made, 1), owner=0)

    def fails(*_: Any) -> None:
        raise error("as planned")

    with monkeypatch.context() as patch:
        patch.setattr(made._spill, "write", fails)
        with pytest.raises(error, match="as planned"):
            made.write(filled(made, 2), owner=0)
    with pytest.raises(KVBoostError, match="make a new cache"):
        list(made.read([slot]))
    made.close()


def test_a_spill_that_ends_early_raises() -> None:
    spill = FileSpill(None)
    with pytest.raises(OSError, match="ends after 0 of"):
        spill.read([3], spill.frame(PAGE)[None], None)
    spill.close()


def test_a_file_system_without_direct_reads_is_read_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    spill = FileSpill(None)
    right = os.preadv

    def refusing(descriptor: int, buffers: Any, offset: int) -> int:
        if spill.direct:
            raise OSError(22, "Invalid argument")
        return right(descriptor, buffers, offset)

    frame = spill.frame(PAGE)
    frame.copy_(content(5))
    spill.write(2, frame)
    spill.direct = True
    monkeypatch.setattr(os, "preadv", refusing)
    found = spill.frame(PAGE)
    spill.read([2], found[None], None)
    assert torch.equal(found, content(5))
    assert not spill.direct
    spill.close()


def test_pages_side_by_side_are_read_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pager(frames=1 + 4 * TRANSIT, group=4)
    frame, mine = made.new_frame(), []
    for number in range(8):  # two owners in turn, as layers are
        frame.copy_(content(number))
        slot = made.write(frame, owner=number % 2)
        mine += [slot] if number % 2 else []
    calls: list[int] = []
    right = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        return right(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    (pages,) = made.read(mine)
    assert [torch.equal(page, content(number)) for number, page in zip((1, 3, 5, 7), pages, strict=True)] == [True] * 4
    assert len(calls) == 1
    assert made.ledger.read_bytes == 4 * PAGE
    made.close()


def test_the_file_has_no_name(tmp_path: Path) -> None:
    spill = FileSpill(tmp_path)
    frame = spill.frame(PAGE)
    spill.write(0, frame)
    assert list(tmp_path.iterdir()) == []  # so that nothing stays, even of a process that is killed
    spill.close()


def test_pages_beside_a_device_without_streams() -> None:
    with Devices():
        spill = HostSpill(torch.device("cuda", 0))
        frame = spill.frame(PAGE).fill_(3)
        spill.write(0, frame)
        spill.read([0], frame.zero_()[None], spill.event())
        assert host(frame).unique().tolist() == [3]


def _wrong_pages(monkeypatch: pytest.MonkeyPatch, *, waits: bool) -> int:
    """How many of 24 pages have other bytes when they are used, where copies come late."""
    delays, wrong = random.Random(1), 0
    with LateDevices(delay=lambda: delays.uniform(0, 0.01)) as seen, monkeypatch.context() as patch:
        patch.setattr("kvboost.offload.kv.pager.streams_for", seen.streams_for)
        if not waits:
            patch.setattr(HostSpill, "_copy", lambda self, pairs, after: self._streams.copy(pairs, after=after))
        made = pager(HostSpill(torch.device("cuda", 0)), frames=1 + TRANSIT * 2, group=2)
        frame = made.new_frame()
        slots = []
        for number in range(8):
            frame.copy_(content(number))
            slots.append(made.write(frame, owner=0))
        for _ in range(3):
            found = [page for pages in made.read(slots, then=slots) for page in host(pages).clone()]
            wrong += sum(not torch.equal(page, content(number)) for number, page in enumerate(found))
        made.close()
        assert not seen.unpinned_bytes or seen.unpinned_bytes == 8 * PAGE, "of what the test itself uploads"
    return wrong


def test_pages_are_right_under_late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _wrong_pages(monkeypatch, waits=True) == 0


def test_seeded_pages_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _wrong_pages(monkeypatch, waits=False) > 0


def test_pages_are_read_after_what_used_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    after: list[Any] = []
    with LateDevices() as seen, monkeypatch.context() as patch:
        streams = seen.streams_for([torch.device("cuda", 0)])
        patch.setattr("kvboost.offload.kv.pager.streams_for", lambda _: streams)
        copy = streams.copy
        patch.setattr(streams, "copy", lambda pairs, *, after: (noted(after), copy(pairs, after=after))[1])

        def noted(event: Any) -> None:
            after.append(event)

        made = pager(HostSpill(torch.device("cuda", 0)), frames=1 + TRANSIT)
        slot = made.write(made.new_frame(), owner=0)
        for _ in made.read([slot]):
            pass
        made.close()
    assert len(after) == 2
    assert all(event is not None for event in after), "of the stream that computes, when it was asked for"
