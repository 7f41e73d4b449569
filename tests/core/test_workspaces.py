from __future__ import annotations

import torch

from kvboost.core.workspaces import WorkspacePool
from kvboost.hf.cache import KVLayout, SlabCache, TensorSpec

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
