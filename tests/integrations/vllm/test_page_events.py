"""Which of vLLM's pages are announced, whatever chunks come and go."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.core.keys import chunk_keys
from kvboost.integrations.vllm import page_events
from kvboost.integrations.vllm.page_events import Changes, PageEvents
from kvboost.types import Chunk
from tests.contracts.blocks import block_of

SIZE = 4


def request(*tokens: int) -> Any:
    """A request as vLLM has it: a hash of each page and all before it."""
    hashes = [hashlib.sha256(repr(tokens[:end]).encode()).digest() for end in range(SIZE, len(tokens) + 1, SIZE)]
    return SimpleNamespace(all_token_ids=list(tokens), block_hashes=hashes, num_tokens=len(tokens), lora_request=None)


def chunks_of(asked: Any, *ends: int) -> list[Chunk]:
    return chunk_keys(b"root", np.array(asked.all_token_ids, dtype=np.uint32), ends)


class Announced:
    """What a router knows."""

    def __init__(self) -> None:
        self.pages: set[tuple[str, bytes]] = set()
        self.parents: dict[bytes, bytes | None] = {}
        self.tokens: dict[bytes, list[int]] = {}

    def hear(self, events: PageEvents) -> None:
        for event in events.drain():
            for page in event.hashes:
                if event.is_stored:
                    assert (event.tier, page) not in self.pages, "announced twice"
                    self.pages.add((event.tier, page))
                    self.parents[page], self.tokens[page] = event.parent, event.tokens
                else:
                    self.pages.remove((event.tier, page))  # none that was not announced


ASKED = [request(*range(21)), request(*range(10), *range(50, 60)), request(*range(8))]
# Cuts at other places than pages' ends; a prompt's end that a longer chunk takes in; a chunk within one page.
CUT = [
    (ASKED[index], chunk)
    for index, ends in ((0, (3, 11, 17)), (0, (3, 11, 16)), (0, (3, 20)), (1, (5, 6, 18)), (2, (8,)))
    for chunk in chunks_of(ASKED[index], *ends)
]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(range(len(CUT))), st.sampled_from(["memory", "disk"]), st.booleans()), max_size=60
    ),
    st.sets(st.sampled_from(range(len(CUT)))),
)
def test_a_page_is_announced_while_a_chunk_that_it_ends_in_is_stored(steps: list[Any], unknown: set[int]) -> None:
    events, router = PageEvents(SIZE), Announced()
    stored: set[tuple[str, int]] = set()
    for index, (asked, chunk) in enumerate(CUT):
        if index not in unknown:
            events.describe(asked, [chunk])
    known = {chunk.prefix_key for index, (_, chunk) in enumerate(CUT) if index not in unknown}
    for index, tier, is_stored in steps:
        # Chunks of the same name are one in the store.
        same = [i for i, (_, chunk) in enumerate(CUT) if chunk.prefix_key == CUT[index][1].prefix_key]
        (stored.update if is_stored else stored.difference_update)({(tier, i) for i in same})
        events.apply([(tier, CUT[index][1].prefix_key, is_stored)])
        router.hear(events)
        right = {
            (where, page)
            for where, i in stored
            if CUT[i][1].prefix_key in known
            for page in CUT[i][0].block_hashes[CUT[i][1].start // SIZE : CUT[i][1].end // SIZE]
        }
        assert router.pages == right
    for _, page in router.pages:
        asked, at = next((a, a.block_hashes.index(page)) for a in ASKED if page in a.block_hashes)
        assert router.tokens[page] == asked.all_token_ids[at * SIZE : (at + 1) * SIZE]
        assert router.parents[page] == (asked.block_hashes[at - 1] if at else None)
    events.clear()
    router.hear(events)
    assert not router.pages
    assert not events._chunks
    assert not events._counts


def test_what_is_remembered_is_bounded_and_what_is_forgotten_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_events, "_MAX_CHUNKS", 2)
    events, router = PageEvents(SIZE), Announced()
    asked = ASKED[0]
    chunks = chunks_of(asked, 4, 8, 12, 16)
    for chunk in chunks:
        events.describe(asked, [chunk])
        events.apply([("memory", chunk.prefix_key, True)])
    router.hear(events)
    assert router.pages == {("memory", page) for page in asked.block_hashes[2:4]}


@pytest.mark.parametrize("hashes", [0, 10], ids=["prefix cache off", "pages of another size"])
def test_pages_without_the_right_names_are_not_announced(hashes: int) -> None:
    events = PageEvents(SIZE)
    asked = SimpleNamespace(**{**vars(ASKED[0]), "block_hashes": [bytes([i]) for i in range(hashes)]})
    (chunk,) = chunks_of(asked, 20)
    events.describe(asked, [chunk])
    events.apply([("memory", chunk.prefix_key, True)])
    assert events.drain() == []


def test_changes_are_taken_once_and_in_order() -> None:
    changes = Changes()
    chunk = chunks_of(ASKED[0], 8)[0]
    changes.stored("memory", block_of(chunk))
    changes.removed("memory", [chunk.prefix_key])
    assert changes.drain() == [("memory", chunk.prefix_key, True), ("memory", chunk.prefix_key, False)]
    assert changes.drain() == []
