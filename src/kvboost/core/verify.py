"""Compares a warm run with a cold one, bit for bit."""

from __future__ import annotations

import torch

from kvboost.core.prefill import Prefiller


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal shape, type and bytes. Stricter than ``torch.equal``, which treats 0.0 and -0.0 as equal."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


def warm_equals_cold(prefiller: Prefiller, tokens: list[int]) -> bool:
    """Prefill ``tokens`` cold, then with KV from a store, then with KV in place; compare. False without reuse."""
    cold_logits, cold_kv, _ = _prefill(prefiller, tokens)
    for drop_workspaces in (True, False):
        if drop_workspaces:
            prefiller.pool.clear()
        logits, kv, reused = _prefill(prefiller, tokens)
        if reused == 0 or not same_bits(cold_logits, logits):
            return False
        if not all(same_bits(cold, warm) for cold, warm in zip(cold_kv, kv, strict=True)):
            return False
    return True


def _prefill(prefiller: Prefiller, tokens: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], int]:
    with prefiller.open(tokens) as state:
        prefiller.advance_to_last_step(state)
        logits = prefiller.finish(state)
        prefiller.commit(state)
        kv = *state.cache.extract(0, len(tokens)), *(tensor.clone() for tensor in state.cache.states())
        return logits, kv, state.plan.exact_tokens
