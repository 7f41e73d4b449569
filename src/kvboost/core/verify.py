"""Holds a warm run against a cold one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvboost.core.clock import StageClock
from kvboost.core.prefill import Prefiller
from kvboost.core.workspaces import WorkspacePool


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal shape, type and bytes. Stricter than ``torch.equal``, to which 0.0 and -0.0 are the same."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


def warm_equals_cold(make_reader: Callable[[WorkspacePool], Prefiller], pool: WorkspacePool, tokens: list[int]) -> bool:
    """Read ``tokens`` cold, then with KV copied from a store, then with KV in place; compare. False without reuse."""
    reader = make_reader(pool)
    cold_logits, cold_rows, _ = _read(reader, tokens)
    for drop_workspaces in (True, False):
        if drop_workspaces:
            pool.clear()
        logits, rows, reused = _read(reader, tokens)
        if reused == 0 or not same_bits(cold_logits, logits):
            return False
        if not all(same_bits(cold, warm) for cold, warm in zip(cold_rows, rows, strict=True)):
            return False
    return True


def _read(reader: Prefiller, tokens: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], int]:
    with reader.open(tokens, boundaries=(), new_rows=0, clock=StageClock()) as reading:
        reader.advance_to_last_step(reading)
        logits = reader.finish(reading)
        reader.commit(reading)
        return logits, reading.cache.extract(0, len(tokens)), reading.plan.exact_tokens
