"""Measures, on the user's own prompts, which repair this model needs: what helps one model harms another.

Called by :meth:`KVBoost.calibrate`. Prompts are prefilled in the given order. Where a prompt repeats text of an earlier
one, full prefill and non-prefix reuse are compared with several strategies at several ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.approx.calibration import Calibration, Comparisons, conclude
from kvboost.approx.find import ApproxReuse
from kvboost.approx.select import STRATEGIES, make_strategy
from kvboost.approx.shadow import FIRST_TOKENS
from kvboost.core.guarded import GuardedStore
from kvboost.core.prefill import Prefiller
from kvboost.errors import ConfigError
from kvboost.hf.runner import ModelRunner
from kvboost.store import MemoryStore

RATIOS = (0.05, 0.15, 0.3, 0.5)
TRIED = ("none", "even", "cacheblend", "auto")
"""Strategies that are compared, cheapest first, unless the settings name one."""

EncodedPrompt = tuple[list[int], Sequence[int]]
"""Token ids and boundaries."""
Tried = tuple[str, float]
"""A strategy's name and a ratio."""


def calibrate(
    prompts: Sequence[EncodedPrompt], *, prefiller: Prefiller, all_strategies: bool, cache_bytes: int, progress: bool
) -> Calibration:
    """Compare the engine's strategy, or all of :data:`TRIED`, at every ratio, over a store of ``cache_bytes``."""
    approx, runner = prefiller.approx, prefiller.runner
    assert isinstance(approx, ApproxReuse)
    assert isinstance(runner, ModelRunner)
    strategies = [make_strategy(name) for name in TRIED] if all_strategies else [approx.repair_settings.strategy]
    for one in strategies:
        if one.name not in STRATEGIES or one != make_strategy(one.name):
            raise ConfigError(
                f"{one!r} cannot be written to a file; calibrate with one of {sorted(STRATEGIES)}, unchanged"
            )
    exact, any_error = prefiller.exact_over(GuardedStore(MemoryStore(cache_bytes))), math.inf
    repairs = {
        (one.name, ratio): replace(approx.repair_settings, strategy=one, ratio=ratio, tolerated_error=any_error)
        for one in strategies
        for ratio in ((0.0,) if one.name == "none" else RATIOS)
    }
    prefillers = {named: approx_over(exact, approx.over(exact.store, repair)) for named, repair in repairs.items()}
    try:
        with tqdm(total=len(prompts), unit="prompt", desc="calibrating", disable=not progress, delay=2) as bar:
            outcomes = compare_on(prompts, runner=runner, exact=exact, approx=prefillers, done=bar.update)
    finally:
        exact.pool.clear()
    conditions, weights = prefiller.keys.conditions, prefiller.keys.snapshot().model.fields["weights"]
    return conclude(outcomes, weights=weights, conditions=conditions)


def approx_over(exact: Prefiller, approx: ApproxReuse) -> Prefiller:
    """The same prefiller with non-prefix reuse."""
    return replace(exact, costs=approx.costs, approx=approx)


def compare_on(
    prompts: Iterable[EncodedPrompt],
    *,
    runner: ModelRunner,
    exact: Prefiller,
    approx: Mapping[Tried, Prefiller],
    done: Callable[[], None],
) -> dict[Tried, Comparisons]:
    """Prefill every prompt in full and with repositioned chunks in each way. All prefillers share one store."""
    outcomes = {named: Comparisons() for named in approx}
    for tokens, boundaries in prompts:
        with exact.open(tokens, boundaries=boundaries, new_tokens=FIRST_TOKENS) as whole:
            exact.advance_to_last_step(whole)
            answer = _greedy(runner, int(exact.finish(whole).argmax()), whole.cache)
            for named, prefiller in approx.items():
                _compare(runner, prefiller, (tokens, boundaries), answer, outcomes[named])
            # Only now: a prompt must not find its own chunks.
            exact.commit(whole)
        done()
    return outcomes


def _greedy(runner: ModelRunner, first: int, cache: Any) -> list[int]:
    """The greedy answer that begins with ``first``; the cache keeps its length."""
    length = cache.get_seq_length()
    answer = [first]
    while len(answer) < FIRST_TOKENS:
        answer.append(int(runner.last_logits(answer[-1:], cache, keep=1).argmax()))
    cache.set_length(length)
    return answer


def _compare(
    runner: ModelRunner, prefiller: Prefiller, prompt: EncodedPrompt, answer: list[int], outcome: Comparisons
) -> None:
    tokens, boundaries = prompt
    with prefiller.open(tokens, boundaries=boundaries, new_tokens=FIRST_TOKENS, approx=True) as state:
        if state.spans is not None:
            prefiller.advance_to_last_step(state)
        if state.spans is None:  # nothing was found, or it could not be repaired
            return
        rest = [*tokens[state.num_computed :], *answer[:-1]]
        same = runner.last_logits(rest, state.cache, keep=len(answer)).argmax(dim=-1).cpu() == torch.tensor(answer)
        outcome.differing.append(not bool(same.all()))
        outcome.agreement.append(float(same.float().mean()))
        if (estimate := state.report().error_estimate) is not None:
            outcome.estimates.append(estimate)
