"""What a replica holds, in short: counted right, sent and read back."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.errors import ConfigError, DamagedRecordError
from kvboost.fleet.index import FleetIndex
from kvboost.fleet.summary import KeySummary, KeyUpdate, short_keys

_STEPS = st.lists(
    st.one_of(
        # A block's key says its content, as real ones do. Content 3 is also the key of block 3.
        st.tuples(st.just("stored"), st.integers(0, 8)),
        st.tuples(st.just("removed"), st.integers(0, 8)),
        st.tuples(st.sampled_from(["clear", "changes", "snapshot"]), st.just(0)),
    ),
    max_size=40,
)


def key(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def content(number: int) -> bytes:
    return key(3) if number == 3 else hashlib.sha256(b"content %d" % (number % 3)).digest()


@given(_STEPS)
def test_a_router_that_hears_every_update_knows_what_the_replica_holds(steps: list[tuple[str, int]]) -> None:
    summary, index, blocks = KeySummary(), FleetIndex(), set[int]()
    for step, number in [*steps, ("changes", 0)]:
        if step == "stored":
            summary.stored([key(number)], content_keys=[content(number)])
            blocks.add(number)
        elif step == "removed":
            summary.removed([key(number)])
            blocks.discard(number)
        elif step == "clear":
            summary.clear()
            blocks.clear()
        else:
            index.apply("a", summary.changes() if step == "changes" else summary.snapshot())
    everything = [key(number) for number in range(9)] + [content(number) for number in range(9)]
    held = {key(number) for number in blocks} | {content(number) for number in blocks}
    assert len(summary) == len(blocks)
    assert (index.holders(short_keys(everything))[:, 0] == [k in held for k in everything]).all()
    assert len(index) == len(held)


def test_what_comes_and_goes_between_two_updates_is_not_sent() -> None:
    summary = KeySummary()
    summary.stored([key(1)], content_keys=[content(1)])
    summary.removed([key(1)])
    update = summary.changes()
    assert not len(update.added)
    assert not len(update.dropped)


@given(st.lists(st.integers(1, 2**64 - 1)), st.lists(st.integers(1, 2**64 - 1)), st.booleans())
def test_an_update_is_read_as_it_was_sent(added: list[int], dropped: list[int], whole: bool) -> None:
    update = KeyUpdate(np.array(added, dtype=np.uint64), np.array(dropped, dtype=np.uint64), whole)
    read = KeyUpdate.from_bytes(update.to_bytes())
    assert (read.added.tolist(), read.dropped.tolist(), read.whole) == (added, dropped, whole)


@given(st.binary(max_size=64), st.integers(0, 200))
def test_other_bytes_are_refused(noise: bytes, length: int) -> None:
    sent = KeyUpdate(np.array([5, 6], dtype=np.uint64), np.array([7], dtype=np.uint64), whole=False).to_bytes()
    for data in (noise, sent[:length], sent + noise[:7]):
        if data != sent:
            with pytest.raises(DamagedRecordError, match="ask the replica"):
                KeyUpdate.from_bytes(data)


def test_an_update_with_an_empty_key_is_refused() -> None:
    bad = KeyUpdate(np.array([0], dtype=np.uint64), np.empty(0, dtype=np.uint64), whole=False)
    with pytest.raises(DamagedRecordError, match="names no key"):
        KeyUpdate.from_bytes(bad.to_bytes())


def test_a_key_of_zeros_is_a_key() -> None:
    assert short_keys([bytes(32)]).tolist() == [1]


def test_keys_of_another_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        short_keys([b"short"])
