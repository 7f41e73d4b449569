"""Blocks are placed once, and none is taken for one that a workspace holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvboost.core.loader import KVLoader
from kvboost.types import Chunk


def chunk(start: int, end: int, key: bytes) -> Chunk:
    return Chunk(start, end, b"", key, None, b"")


def block(key: bytes) -> Any:
    return SimpleNamespace(key=key, tensors=key)


class Workspaces:
    """One idle workspace that holds these chunks."""

    def __init__(self, *held: bytes) -> None:
        self._held = held

    def take(self, *, tokens: int, chain: list[bytes]) -> tuple[object, int]:
        common = 0
        while common < min(len(chain), len(self._held)) and chain[common] == self._held[common]:
            common += 1
        return object(), common


def test_the_end_of_another_prompt_is_placed_over_a_chunk_that_the_workspace_holds() -> None:
    """A tier delivers the first chunk; the second was evicted, and a longer piece is stored in its place."""
    placed: list[tuple[int, bytes]] = []
    codec: Any = SimpleNamespace(place=lambda cache, start, tensors: placed.append((start, tensors)))
    pool: Any = Workspaces(b"one", b"two")
    first, second, longer = chunk(0, 96, b"one"), chunk(96, 110, b"two"), chunk(96, 120, b"longer")
    loader = KVLoader([first, second], tokens=200, codec=codec, pool=pool)
    loader.arrived(first, block(b"one"))
    loader.finish([block(b"one"), block(b"longer")], [first, longer])
    assert placed == [(96, b"longer")]


def test_what_a_workspace_holds_is_not_placed_again() -> None:
    placed: list[tuple[int, bytes]] = []
    codec: Any = SimpleNamespace(place=lambda cache, start, tensors: placed.append((start, tensors)))
    pool: Any = Workspaces(b"one")
    chunks = [chunk(0, 96, b"one"), chunk(96, 110, b"two")]
    KVLoader(chunks, tokens=200, codec=codec, pool=pool).finish([block(b"one"), block(b"two")], chunks)
    assert placed == [(96, b"two")]
