"""Whatever was moved before, an exact hit is exact: random prompts over the same parts, in and out of order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings

from kvboost import GenerationMode, KVBoost
from tests.approx.test_find import HEAD, engine_for, joined, text
from tests.helpers.models import tiny_model

_PARTS = [text(300 + i, 24 + 8 * i) for i in range(5)]
_MODEL: list[Any] = []

requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, len(_PARTS) - 1), min_size=1, max_size=4),
        st.sampled_from(["prefill", "generate", "warm", "exact"]),
    ),
    min_size=2,
    max_size=6,
)


def _bits_agree(engine: KVBoost, cold: KVBoost, tokens: list[int], ends: list[int]) -> None:
    found = engine.prefill(tokens, boundaries=ends, mode=GenerationMode.PREFIX_CACHE)
    cold.clear()
    assert found.reuse.bitwise
    assert torch.equal(found.logits, cold.prefill(tokens, boundaries=ends).logits)


@given(
    asked=requests,
    ratio=st.sampled_from([0.0, 0.3]),
    room=st.sampled_from([4, 12, 1000]),
    workspace=st.sampled_from(["0", "1GiB"]),
)
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_no_exact_hit_was_touched_by_moved_text(
    asked: list[tuple[list[int], str]], ratio: float, room: int, workspace: str
) -> None:
    if not _MODEL:
        _MODEL.append(tiny_model("llama", max_position_embeddings=1024))
    options: dict[str, Any] = {"recompute_ratio": ratio, "max_chunks": room, "workspace_bytes": workspace}
    engine = engine_for(_MODEL[0], chunk_size=16, force_approx=True, **options)
    cold = engine_for(_MODEL[0], chunk_size=16, quality="exact")
    for number, (order, how) in enumerate(asked):
        tokens, ends = joined(HEAD, *(_PARTS[index] for index in order), text(400 + number, 5))
        do: dict[str, Callable[[], Any]] = {
            "prefill": lambda t=tokens, e=ends: engine.prefill(t, boundaries=e),
            "generate": lambda t=tokens, e=ends: engine.generate(t, boundaries=e, max_new_tokens=3, temperature=0),
            "warm": lambda t=tokens, e=ends: engine.warm(t, boundaries=e),
            "exact": lambda: None,
        }
        do[how]()
        _bits_agree(engine, cold, tokens, ends)
    assert engine._store.stats().leased == 0
    engine.close()
    cold.close()
