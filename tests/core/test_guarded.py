"""A store without memory, or without a head, never fails a request."""

from __future__ import annotations

import pytest
import torch

from kvboost.core.guarded import GuardedStore
from kvboost.store import MemoryStore
from kvboost.testing.blocks import block_of
from kvboost.testing.content import prompt
from kvboost.types import KVBlock, PutOutcome


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_no_memory_for_a_copy_is_a_refusal_that_is_logged_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    store = GuardedStore(MemoryStore(10**6))

    def make() -> KVBlock:
        raise error

    assert [store.keep(make) for _ in range(3)] == [PutOutcome.REFUSED] * 3
    assert store.errors == 3
    assert len(caplog.records) == 1
    assert "cache_bytes" in caplog.text
    assert store.keep(lambda: block_of(prompt("a")[0])) is PutOutcome.STORED


def test_a_mistake_of_ours_is_not_taken_for_a_lack_of_memory() -> None:
    def make() -> KVBlock:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        GuardedStore(MemoryStore(10**6)).keep(make)
