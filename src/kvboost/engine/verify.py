"""Holds a warm run against a cold one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvboost.engine.clock import StageClock
from kvboost.engine.reader import PromptReader


def warm_equals_cold(make_reader: Callable[[], PromptReader], tokens: list[int]) -> bool:
    """Read ``tokens`` twice with one new reader and once with another; compare. False if nothing was reused."""
    cold_logits, cold_rows, _ = _read(make_reader(), tokens)
    reader = make_reader()
    _read(reader, tokens)
    warm_logits, warm_rows, reused = _read(reader, tokens)
    return (
        reused > 0
        and torch.equal(cold_logits, warm_logits)
        and all(torch.equal(cold, warm) for cold, warm in zip(cold_rows, warm_rows, strict=True))
    )


def _read(reader: PromptReader, tokens: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], int]:
    with reader.open(tokens, boundaries=(), new_rows=0, clock=StageClock()) as reading:
        reader.advance_to_last_step(reading)
        logits = reader.finish(reading)
        reader.commit(reading)
        return logits, reading.cache.extract(0, len(tokens)), reading.plan.exact_tokens
