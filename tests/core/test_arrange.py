"""Orders of documents: checked against every history that hypothesis can think of, and against a list of all paths."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvboost.core import arrange
from kvboost.core.arrange import Order, ServedPaths

HEADS = (b"", b"head")
NAMES = st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]), max_size=6)
REQUESTS = st.lists(st.tuples(st.sampled_from(HEADS), NAMES, st.integers(0, 3), st.integers(0, 3)), max_size=30)


_PATIENT = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def size(name: bytes) -> int:
    return 10 + name[0] % 7


def ask(paths: ServedPaths, documents: Sequence[bytes], *, head: bytes = b"", first: int = 0, last: int = 0) -> Order:
    return paths.arrange(head, documents, tokens=lambda index: size(documents[index]), keep_first=first, keep_last=last)


def served_tokens(history: Sequence[tuple[bytes, list[bytes]]], head: bytes, documents: Sequence[bytes]) -> int:
    """The longest beginning shared with an earlier request, the slow way."""
    most = 0
    for other_head, other in history:
        if other_head != head:
            continue
        shared = 0
        for ours, theirs in zip(documents, other, strict=False):
            if ours != theirs:
                break
            shared += size(ours)
        most = max(most, shared)
    return most


@_PATIENT
@given(REQUESTS)
def test_an_order_has_every_document_once_and_never_reuses_less_than_as_sent(
    requests: list[tuple[bytes, list[bytes], int, int]],
) -> None:
    paths, again = ServedPaths(), ServedPaths()
    history: list[tuple[bytes, list[bytes]]] = []
    for head, documents, first, last in requests:
        order = ask(paths, documents, head=head, first=first, last=last)
        assert sorted(order.indexes) == list(range(len(documents)))
        assert order.indexes[:first] == tuple(range(len(documents)))[:first]
        if last:
            assert order.indexes[-last:] == tuple(range(len(documents)))[-last:]
        arranged = [documents[index] for index in order.indexes]
        assert order.served_tokens == served_tokens(history, head, arranged)
        assert order.served_tokens == sum(size(name) for name in arranged[: order.served_documents])
        assert order.served_tokens >= served_tokens(history, head, documents)
        assert order == ask(again, documents, head=head, first=first, last=last)  # the same history, the same order
        history.append((head, arranged))


@_PATIENT
@given(REQUESTS, st.integers(1, 12))
def test_a_small_memory_forgets_whole_ends_of_paths_and_promises_no_more_than_was_served(
    requests: list[tuple[bytes, list[bytes], int, int]], most: int
) -> None:
    paths = ServedPaths(max_nodes=most)
    history: list[tuple[bytes, list[bytes]]] = []
    for head, documents, first, last in requests:
        order = ask(paths, documents, head=head, first=first, last=last)
        assert sorted(order.indexes) == list(range(len(documents)))
        arranged = [documents[index] for index in order.indexes]
        assert order.served_tokens <= served_tokens(history, head, arranged)
        assert len(paths._recent) <= most
        history.append((head, arranged))


def test_the_order_follows_the_path_with_most_tokens() -> None:
    paths = ServedPaths()
    ask(paths, [b"c", b"a"])
    ask(paths, [b"e", b"b"], first=2)
    # size(e) + size(b) > size(c) + size(a) is not assumed: the longer of the two must win.
    wanted = max(([b"c", b"a"], [b"e", b"b"]), key=lambda path: sum(size(name) for name in path))
    documents = [b"a", b"b", b"c", b"e"]
    order = ask(paths, documents)
    assert [documents[index] for index in order.indexes][:2] == wanted
    assert order.served_documents == 2


def test_behind_the_served_path_documents_stay_as_sent() -> None:
    paths = ServedPaths()
    ask(paths, [b"a"])
    documents = [b"f", b"b", b"a", b"c"]
    assert [documents[index] for index in ask(paths, documents).indexes] == [b"a", b"f", b"b", b"c"]


def test_the_end_of_a_path_is_forgotten_first() -> None:
    paths = ServedPaths(max_nodes=2)  # the head is one
    ask(paths, [b"a", b"b"])
    assert ask(paths, [b"b", b"a"]) == Order((1, 0), 1, size(b"a"))


def test_heads_are_apart() -> None:
    paths = ServedPaths()
    ask(paths, [b"b", b"a"], head=b"one")
    assert ask(paths, [b"a", b"b"], head=b"two").served_documents == 0
    assert ask(paths, [b"a", b"b"], head=b"one").indexes == (1, 0)


def test_lengths_are_asked_for_new_documents_only() -> None:
    asked: list[int] = []

    def tokens(index: int) -> int:
        asked.append(index)
        return 5

    paths = ServedPaths()
    paths.arrange(b"", [b"a", b"b"], tokens=tokens)
    paths.arrange(b"", [b"b", b"c", b"a"], tokens=tokens)
    assert asked == [0, 1, 1]


def test_clear_forgets_everything() -> None:
    paths = ServedPaths()
    ask(paths, [b"b", b"a"])
    paths.clear()
    assert len(paths._recent) == 0
    assert ask(paths, [b"a", b"b"]) == Order((0, 1), 0, 0)


def test_a_search_cut_short_is_as_good_as_the_order_as_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ServedPaths()
    documents = [b"a", b"b", b"c", b"d"]
    for turn in range(4):
        ask(paths, documents[turn:] + documents[:turn], first=4)
    monkeypatch.setattr(arrange, "_MAX_VISITED", 1)
    sent = [b"d", b"a", b"b", b"c"]
    assert ask(paths, sent).indexes == (0, 1, 2, 3)
    assert ask(paths, sent).served_documents == 4


def test_threads_may_share_it() -> None:
    paths = ServedPaths(max_nodes=40)

    def serve(seed: int) -> None:
        for turn in range(200):
            documents = [bytes([97 + (seed * turn + step * step) % 23]) for step in range(5)]
            assert sorted(ask(paths, documents).indexes) == [0, 1, 2, 3, 4]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(serve, range(1, 5)))
    assert len(paths._recent) <= 40
