"""Blocks are placed once, and none is taken for one that a workspace holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kvboost.core.workspaces import KVLoader, WorkspacePool
from kvboost.hf.cache import KVLayout, SlabCache, TensorSpec
from kvboost.types import Chunk

_LAYOUT = KVLayout((TensorSpec(1, 4, torch.float32, torch.device("cpu")),) * 2)


def _pool(capacity_bytes: int) -> WorkspacePool:
    return WorkspacePool(
        lambda tokens: SlabCache(_LAYOUT, capacity=tokens),
        bytes_per_token=_LAYOUT.bytes_per_token,
        capacity_bytes=capacity_bytes,
    )


_A, _B, _C = b"a" * 32, b"b" * 32, b"c" * 32


def test_the_workspace_that_holds_most_of_the_prompt_is_taken() -> None:
    pool = _pool(10**6)
    first, _ = pool.take(tokens=10, chain=[])
    second, _ = pool.take(tokens=10, chain=[])
    pool.give_back(first, held=[_A, _B])
    pool.give_back(second, held=[_A, _C])
    cache, in_place = pool.take(tokens=10, chain=[_A, _B, _C])
    assert (cache, in_place) == (first, 2)
    assert pool.take(tokens=10, chain=[_C]) == (second, 0)


def test_one_owner_at_a_time_and_never_over_budget() -> None:
    pool = _pool(3 * 256 * 32)
    caches = [pool.take(tokens=10, chain=[])[0] for _ in range(6)]
    assert len({id(cache) for cache in caches}) == 6
    for cache in caches:
        pool.give_back(cache, held=[])
        assert pool.idle_bytes <= 3 * 256 * 32
    pool.clear()
    assert pool.idle_bytes == 0


def test_too_small_and_multiplied_workspaces_are_not_used() -> None:
    pool = _pool(10**6)
    small, _ = pool.take(tokens=10, chain=[])
    pool.give_back(small, held=[_A])
    assert pool.take(tokens=1000, chain=[_A])[0] is not small
    small.batch_repeat_interleave(2)
    pool.clear()
    pool.give_back(small, held=[_A])
    assert pool.idle_bytes == 0


def test_a_growing_chat_keeps_its_workspace() -> None:
    pool = _pool(10**8)
    first, _ = pool.take(tokens=1500, chain=[])
    pool.give_back(first, held=[_A])
    assert pool.take(tokens=1740, chain=[_A, _B]) == (first, 1)


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
    codec: Any = SimpleNamespace(place_each=lambda cache, blocks: placed.extend(blocks))
    pool: Any = Workspaces(b"one", b"two")
    first, second, longer = chunk(0, 96, b"one"), chunk(96, 110, b"two"), chunk(96, 120, b"longer")
    loader = KVLoader([first, second], tokens=200, codec=codec, pool=pool)
    loader.arrived(first, block(b"one"))
    loader.finish([block(b"one"), block(b"longer")], [first, longer])
    assert placed == [(96, b"longer")]


def test_what_a_workspace_holds_is_not_placed_again() -> None:
    placed: list[tuple[int, bytes]] = []
    codec: Any = SimpleNamespace(place_each=lambda cache, blocks: placed.extend(blocks))
    pool: Any = Workspaces(b"one")
    chunks = [chunk(0, 96, b"one"), chunk(96, 110, b"two")]
    KVLoader(chunks, tokens=200, codec=codec, pool=pool).finish([block(b"one"), block(b"two")], chunks)
    assert placed == [(96, b"two")]
