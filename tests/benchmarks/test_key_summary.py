"""What has changed in a simulated replica: counted right."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.key_summary import KeySummary, SimulatedIndex, keys_of
from kvboost.fleet.index import short_keys

_STEPS = st.lists(
    st.one_of(
        # A block's key says its content, as real ones do. Content 3 is also the key of block 3.
        st.tuples(st.just("stored"), st.integers(0, 8)),
        st.tuples(st.just("removed"), st.integers(0, 8)),
        st.tuples(st.sampled_from(["clear", "changes"]), st.just(0)),
    ),
    max_size=40,
)


def key(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def content(number: int) -> bytes:
    return key(3) if number == 3 else hashlib.sha256(b"content %d" % (number % 3)).digest()


@settings(deadline=None)
@given(_STEPS)
def test_a_router_that_hears_every_update_knows_what_the_replica_holds(steps: list[tuple[str, int]]) -> None:
    summary, index, blocks = KeySummary(), SimulatedIndex(), set[int]()
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
            added, dropped = summary.changes()
            index.drop("a", dropped)
            index.add("a", added)
    everything = [key(number) for number in range(9)] + [content(number) for number in range(9)]
    held = {key(number) for number in blocks} | {content(number) for number in blocks}
    assert len(summary) == len(blocks)
    assert (index.holders(short_keys(everything))[:, 0] == [k in held for k in everything]).all()
    assert keys_of(index) == len(held)


def test_what_comes_and_goes_between_two_updates_is_not_sent() -> None:
    summary = KeySummary()
    summary.stored([key(1)], content_keys=[content(1)])
    summary.removed([key(1)])
    assert [len(keys) for keys in summary.changes()] == [0, 0]
