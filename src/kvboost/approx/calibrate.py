"""Finds out, on the user's own prompts, how many rows must be computed again for this model.

Called by :meth:`KVBoost.calibrate`. Prompts are read in the order given, each with what the earlier ones left:
where their texts turn up again, full reading and moved reuse are compared at several ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.approx.calibration import Calibration, Comparisons, conclude
from kvboost.approx.select import STRATEGIES, make_strategy
from kvboost.approx.shadow import FIRST_TOKENS
from kvboost.core.clock import StageClock
from kvboost.core.guarded import GuardedStore
from kvboost.core.prefill import Prefiller
from kvboost.core.workspaces import WorkspacePool
from kvboost.engine.assembly import Assembly
from kvboost.errors import ConfigError
from kvboost.hf.runner import ModelRunner
from kvboost.store import MemoryStore

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)


def calibrate(
    prompts: Sequence[list[int]],
    *,
    boundaries: Sequence[Sequence[int]],
    parts: Assembly,
    progress: bool,
) -> Calibration:
    """Compare at every ratio, on a store of its own."""
    assert parts.moving is not None
    repair = parts.moving.repair_settings
    if repair.strategy.name not in STRATEGIES or repair.strategy != make_strategy(repair.strategy.name):
        raise ConfigError(
            f"{repair.strategy!r} cannot be named in a file; calibrate with one of {sorted(STRATEGIES)} as it is"
        )
    store = GuardedStore(MemoryStore(int(parts.config.cache_bytes)))
    pool = WorkspacePool(parts.facts.layout, capacity_bytes=int(parts.config.workspace_bytes))
    moving = {
        ratio: parts.moving_reader(store, pool, replace(repair, ratio=ratio, tolerated_error=math.inf))
        for ratio in RATIOS
    }
    with tqdm(total=len(prompts), unit="prompt", desc="calibrating", disable=not progress, delay=2) as bar:
        outcomes = compare_on(
            prompts,
            boundaries=boundaries,
            runner=parts.runner,
            exact=parts.exact_reader(store, pool),
            moving=moving,
            step=bar.update,
        )
    return conclude(
        outcomes, weights=parts.weights, conditions=parts.reader.names.conditions, strategy=repair.strategy.name
    )


def compare_on(
    prompts: Iterable[list[int]],
    *,
    boundaries: Iterable[Sequence[int]],
    runner: ModelRunner,
    exact: Prefiller,
    moving: dict[float, Prefiller],
    step: Callable[[], None],
) -> dict[float, Comparisons]:
    """Read every prompt whole and with moved chunks at each ratio. All readers share one store."""
    outcomes = {ratio: Comparisons() for ratio in moving}
    for tokens, ends in zip(prompts, boundaries, strict=True):
        with exact.open(tokens, boundaries=ends, new_rows=FIRST_TOKENS, clock=StageClock()) as whole:
            exact.advance_to_last_step(whole)
            answer = _greedy(runner, tokens[whole.plan.steps[-1].start :], whole.cache)
            for ratio, reader in moving.items():
                _compare(runner, reader, tokens, ends, answer, outcomes[ratio])
            # Only now: a prompt must not find itself.
            exact.commit(whole)
        step()
    return outcomes


def _greedy(runner: ModelRunner, tokens: Sequence[int], cache: Any) -> list[int]:
    """The first tokens of the greedy answer; the cache keeps its length."""
    length = cache.get_seq_length()
    answer = [int(runner.next_tokens(tokens, cache, keep=1))]
    while len(answer) < FIRST_TOKENS:
        answer.append(int(runner.next_tokens(answer[-1:], cache, keep=1)))
    cache.set_length(length)
    return answer


def _compare(
    runner: ModelRunner,
    reader: Prefiller,
    tokens: list[int],
    boundaries: Sequence[int],
    answer: list[int],
    outcome: Comparisons,
) -> None:
    with reader.open(tokens, boundaries=boundaries, new_rows=FIRST_TOKENS, clock=StageClock(), move=True) as reading:
        if reading.moved is None:
            return
        reader.advance_to_last_step(reading)
        rest = [*tokens[reading.plan.steps[-1].start :], *answer[:-1]]
        same = runner.next_tokens(rest, reading.cache, keep=len(answer)).cpu() == torch.tensor(answer)
        outcome.differing.append(not bool(same.all()))
        outcome.agreement.append(float(same.float().mean()))
        if reading.moved.error_estimate is not None:
            outcome.estimates.append(reading.moved.error_estimate)
