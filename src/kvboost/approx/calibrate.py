"""Measures, on the user's own prompts, how many positions this model needs recomputed.

Called by :meth:`KVBoost.calibrate`. Prompts are prefilled in the given order. Where a prompt repeats text of an earlier
one, full prefill and non-prefix reuse are compared at several ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.approx.calibration import Calibration, Comparisons, conclude
from kvboost.approx.find import ApproxReuse
from kvboost.approx.select import STRATEGIES, make_strategy
from kvboost.approx.shadow import FIRST_TOKENS
from kvboost.core.guarded import GuardedStore
from kvboost.core.prefiller import Prefiller
from kvboost.errors import ConfigError
from kvboost.hf.runner import ModelRunner
from kvboost.store import MemoryStore

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)

EncodedPrompt = tuple[list[int], Sequence[int]]
"""Token ids and boundaries."""


def calibrate(
    prompts: Sequence[EncodedPrompt], *, prefiller: Prefiller, cache_bytes: int, progress: bool
) -> Calibration:
    """Compare at every ratio, with a separate store of ``cache_bytes``."""
    approx, runner = prefiller.approx, prefiller.runner
    assert isinstance(approx, ApproxReuse)
    assert isinstance(runner, ModelRunner)
    repair = approx.repair_settings
    if repair.strategy.name not in STRATEGIES or repair.strategy != make_strategy(repair.strategy.name):
        raise ConfigError(
            f"{repair.strategy!r} cannot be written to a file; calibrate with one of {sorted(STRATEGIES)}, unchanged"
        )
    exact = prefiller.exact_over(GuardedStore(MemoryStore(cache_bytes)))
    at_ratio = {
        ratio: approx_over(exact, approx.over(exact.store, replace(repair, ratio=ratio, tolerated_error=math.inf)))
        for ratio in RATIOS
    }
    try:
        with tqdm(total=len(prompts), unit="prompt", desc="calibrating", disable=not progress, delay=2) as bar:
            outcomes = compare_on(prompts, runner=runner, exact=exact, approx=at_ratio, done=bar.update)
    finally:
        exact.pool.clear()
    conditions, weights = prefiller.keys.conditions, prefiller.keys.snapshot().model.fields["weights"]
    return conclude(outcomes, weights=weights, conditions=conditions, strategy=repair.strategy.name)


def approx_over(exact: Prefiller, approx: ApproxReuse) -> Prefiller:
    """The same prefiller with non-prefix reuse."""
    return replace(exact, costs=approx.costs, approx=approx)


def compare_on(
    prompts: Iterable[EncodedPrompt],
    *,
    runner: ModelRunner,
    exact: Prefiller,
    approx: dict[float, Prefiller],
    done: Callable[[], None],
) -> dict[float, Comparisons]:
    """Prefill every prompt in full and with repositioned chunks at each ratio. All prefillers share one store."""
    outcomes = {ratio: Comparisons() for ratio in approx}
    for tokens, boundaries in prompts:
        with exact.open(tokens, boundaries=boundaries, new_tokens=FIRST_TOKENS) as whole:
            exact.advance_to_last_step(whole)
            answer = _greedy(runner, int(exact.finish(whole).argmax()), whole.cache)
            for ratio, prefiller in approx.items():
                _compare(runner, prefiller, (tokens, boundaries), answer, outcomes[ratio])
            # Only now: a prompt must not find its own chunks.
            exact.commit(whole)
        done()
    return outcomes


def _greedy(runner: ModelRunner, first: int, cache: Any) -> list[int]:
    """The greedy answer that begins with ``first``; the cache keeps its length."""
    length = cache.get_seq_length()
    answer = [first]
    while len(answer) < FIRST_TOKENS:
        answer.append(int(runner.next_tokens(answer[-1:], cache, keep=1)))
    cache.set_length(length)
    return answer


def _compare(
    runner: ModelRunner, prefiller: Prefiller, prompt: EncodedPrompt, answer: list[int], outcome: Comparisons
) -> None:
    tokens, boundaries = prompt
    with prefiller.open(tokens, boundaries=boundaries, new_tokens=FIRST_TOKENS, approx=True) as state:
        if state.spans is None:
            return
        prefiller.advance_to_last_step(state)
        rest = [*tokens[state.last_step :], *answer[:-1]]
        same = runner.next_tokens(rest, state.cache, keep=len(answer)).cpu() == torch.tensor(answer)
        outcome.differing.append(not bool(same.all()))
        outcome.agreement.append(float(same.float().mean()))
        if (estimate := state.report().error_estimate) is not None:
            outcome.estimates.append(estimate)
