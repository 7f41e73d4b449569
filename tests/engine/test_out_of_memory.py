"""Memory runs out while KV is stored: the request has its answer all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.hf.cache import SlabCache
from kvboost.hf.codec import KVCodec

_PROMPT = [(7 * i * i + i) % 61 + 3 for i in range(200)]


def test_out_of_memory_while_storing_is_a_refusal(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, calls = KVCodec.pack, 0

    def pack(self: KVCodec, tensors: Sequence[torch.Tensor], *, start: int) -> tuple[torch.Tensor, ...]:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(self, tensors, start=start)

    wanted = {"max_new_tokens": 4, "temperature": 0}
    with KVBoost(tiny("llama"), quality="exact", chunking="fixed", chunk_size=16) as engine:
        want = engine.generate(_PROMPT, **wanted).token_ids
        engine.clear()
        monkeypatch.setattr(KVCodec, "pack", pack)
        for _ in range(2):
            assert engine.generate(_PROMPT, **wanted).token_ids == want
        stats = engine.cache_stats()
        assert stats["store_errors"] == 2
        assert stats["hot_chunks"] == 3
    assert caplog.text.count("no memory for a copy") == 1


def test_out_of_memory_while_a_state_is_kept_is_a_refusal(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = SlabCache.states

    class NoMemory:
        def clone(self) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with KVBoost(tiny("qwen3_5_text"), quality="exact", numerics="fast") as engine:
        want = engine.prefill(_PROMPT).logits
        engine.clear()
        monkeypatch.setattr(SlabCache, "states", lambda self: tuple(NoMemory() for _ in right(self)))
        for _ in range(2):
            found = engine.prefill(_PROMPT)
            assert found.reuse.exact_tokens == 0
            torch.testing.assert_close(found.logits, want)
        stats = engine.cache_stats()
        assert stats["store_errors"] == 2
        assert stats["hot_chunks"] > 0
    assert caplog.text.count("no memory for a copy") == 1
