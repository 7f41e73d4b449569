"""Models loaded with FlashAttention-2: what works with their kernel, and what is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost import KVBoost, UnsupportedModelError
from kvboost.approx.recompute import RecomputeRunner
from kvboost.hf.runner import ModelRunner
from tests.helpers.kernels import with_flash_attention

_TEXT = [3 + i * i % 89 for i in range(300)]


def test_prefixes_are_reused_with_their_own_kernel(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = with_flash_attention(tiny("llama"), monkeypatch)
    wanted = {"max_new_tokens": 8, "temperature": 0}
    with KVBoost(model, chunk_size=16, numerics="fast") as engine:
        assert engine.session is not None
        assert engine.session.prefiller.rule.masked == "none"
        cold = engine.generate(_TEXT, **wanted)
        engine.session.prefiller.pool.clear()
        warm = engine.generate(_TEXT, **wanted)
        batch = engine.generate_batch([_TEXT[:50], _TEXT[:80], _TEXT], **wanted)
    assert warm.reuse.exact_tokens == 299
    assert warm.token_ids == cold.token_ids == batch[2].token_ids
    assert calls


def test_kv_is_paged(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = with_flash_attention(tiny("llama"), monkeypatch)
    with KVBoost(model, kv_bytes="64KiB", strict=True) as engine:
        paged = engine.generate(_TEXT, max_new_tokens=8, temperature=0)
    assert paged.reuse.paged
    calls.clear()
    plain = model.generate(torch.tensor([_TEXT]), max_new_tokens=8, do_sample=False)[0, len(_TEXT) :]
    assert calls
    assert list(paged.token_ids) == plain.tolist()


def test_non_prefix_reuse_is_refused(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = with_flash_attention(tiny("llama"), monkeypatch)
    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa' for non-prefix reuse"):
        RecomputeRunner(ModelRunner(model))
