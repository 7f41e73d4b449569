"""The bound holds at all times together, is where its formula says, and the guard acts on it and on nothing else."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.approx.guard import DisagreementBound, ReuseGuard

STEPS = 2000
RUNS = 400
SHARES = (0.01, 0.05, 0.3, 0.5, 0.9)

Fed = TypeVar("Fed", DisagreementBound, ReuseGuard)
counts = st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


def excluded_counts(share: float, *, confidence: float, steps: int) -> tuple[list[int], list[int]]:
    """For every number of checks: the most disagreements that put ``upper`` below, the fewest that put ``lower`` above.

    Both bounds rise with the disagreements (tested below), and both answers rise with the checks, so one
    walk finds all of them, and a run of any length is held against them at every single step.
    """
    too_few, too_many = [-1], [1]
    for checked in range(1, steps + 1):
        few, many = too_few[-1], too_many[-1]
        while few < checked and at(few + 1, checked, confidence).upper < share:
            few += 1
        while many <= checked and at(many, checked, confidence).lower <= share:
            many += 1
        too_few.append(few)
        too_many.append(many)
    return too_few, too_many


def at(disagreements: int, checked: int, confidence: float = 0.95) -> DisagreementBound:
    return DisagreementBound(confidence, checked=checked, disagreements=disagreements)


def check_coverage(share: float, *, confidence: float = 0.95, steps: int = STEPS) -> None:
    """No more runs than allowed are ever outside: simulated, and exactly."""
    too_few, too_many = (np.array(edge) for edge in excluded_counts(share, confidence=confidence, steps=steps))
    rng = np.random.default_rng(20)
    seen = np.cumsum(rng.random((RUNS, steps)) < share, axis=1)
    wrong = ((seen <= too_few[1:]) | (seen >= too_many[1:])).any(axis=1).sum()
    alpha = 1 - confidence
    slack = 3 * math.sqrt(RUNS * alpha * (1 - alpha))
    assert wrong <= RUNS * alpha + slack, f"{wrong} of {RUNS} runs were outside at some time"

    # Exactly: the distribution of the count over runs that were never outside, step by step.
    alive = np.zeros(steps + 2)
    alive[0] = 1.0
    for checked in range(1, steps + 1):
        alive[1:] = alive[1:] * (1 - share) + alive[:-1] * share
        alive[0] *= 1 - share
        alive[: too_few[checked] + 1] = 0.0
        alive[too_many[checked] :] = 0.0
    assert 1 - alive.sum() <= alpha, f"{1 - alive.sum():.3f} of all runs are outside at some time"


@pytest.mark.parametrize("share", SHARES)
def test_the_bounds_hold_at_all_times_together(share: float) -> None:
    check_coverage(share)


def test_another_confidence_holds_as_well() -> None:
    check_coverage(0.2, confidence=0.8)


# Bugs put in on purpose: intervals that hold for a number of checks fixed beforehand.


def wilson(self: DisagreementBound, sign: int) -> float:
    n, mean, z = self.checked, self.disagreements / self.checked, 1.96
    middle, half = mean + z * z / (2 * n), z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return (middle + sign * half) / (1 + z * z / n)


def clopper_pearson(self: DisagreementBound, sign: int) -> float:
    n, s = self.checked, self.disagreements
    terms = np.arange(s, n + 1) if sign < 0 else np.arange(0, s + 1)
    if len(terms) == n + 1:
        return 0.0 if sign < 0 else 1.0
    logs = np.array([math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in terms])
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        tail = np.exp(logs + terms * math.log(middle) + (n - terms) * math.log1p(-middle)).sum()
        low, high = (middle, high) if (tail < 0.025) == (sign < 0) else (low, middle)
    return low


@pytest.mark.parametrize(("bug", "steps"), [(wilson, STEPS), (clopper_pearson, 400)])  # the second is slow
def test_a_bound_for_a_fixed_number_of_checks_is_caught(
    bug: Callable[[DisagreementBound, int], float], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_coverage(0.3, steps=steps)
    for name, sign in (("lower", -1), ("upper", 1)):
        monkeypatch.setattr(DisagreementBound, name, property(lambda self, sign=sign: bug(self, sign)))
    with pytest.raises(AssertionError, match="runs were outside"):
        check_coverage(0.3, steps=steps)


# The formula.


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
@pytest.mark.parametrize(("disagreed", "checked"), [(s, n) for n in (1, 2, 3, 7, 12) for s in range(n + 1)])
def test_the_ends_are_where_the_integrated_likelihood_ratio_reaches_its_limit(
    disagreed: int, checked: int, confidence: float
) -> None:
    # With q = sin(x)**2, Jeffreys' prior is flat in x, and the trapezium rule is exact for such polynomials.
    points = 400
    total = 0.0
    for i in range(points + 1):
        x = math.pi / 2 * i / points
        weight = 0.5 if i in (0, points) else 1.0
        total += weight * math.sin(x) ** (2 * disagreed) * math.cos(x) ** (2 * (checked - disagreed))
    averaged = total / points
    bound = at(disagreed, checked, confidence)
    for end, certain in ((bound.lower, disagreed == 0), (bound.upper, disagreed == checked)):
        if not certain:
            ratio = averaged / (end**disagreed * (1 - end) ** (checked - disagreed))
            assert ratio == pytest.approx(1 / (1 - confidence), rel=1e-9)


def test_before_the_first_check_nothing_is_known() -> None:
    assert (DisagreementBound().lower, DisagreementBound().upper) == (0.0, 1.0)


@given(counts)
def test_the_bounds_enclose_the_observed_share(seen: tuple[int, int]) -> None:
    bound = at(*seen)
    assert 0 <= bound.lower <= seen[0] / seen[1] <= bound.upper <= 1


@given(counts)
def test_one_more_disagreement_raises_both_and_one_more_agreement_lowers_both(seen: tuple[int, int]) -> None:
    bound, worse, better = at(*seen), at(*seen), at(*seen)
    worse.observe(True)
    better.observe(False)
    assert better.lower <= bound.lower <= worse.lower
    assert better.upper <= bound.upper <= worse.upper


@given(st.lists(st.booleans(), max_size=40), st.randoms(use_true_random=False))
def test_the_order_of_what_was_seen_does_not_matter(seen: list[bool], rng: random.Random) -> None:
    shuffled = rng.sample(seen, len(seen))
    one, other = feed(DisagreementBound(), seen), feed(DisagreementBound(), shuffled)
    assert (one.lower, one.upper) == (other.lower, other.upper)
    assert (one.checked, one.disagreements) == (len(seen), sum(seen))


@pytest.mark.parametrize(("disagreed", "checked"), [(0, 10**12), (1, 10**12), (10**12 - 1, 10**12), (10**12, 10**12)])
def test_huge_counts_stay_inside_zero_and_one(disagreed: int, checked: int) -> None:
    bound = at(disagreed, checked)
    assert 0 <= bound.lower <= disagreed / checked <= bound.upper <= 1
    assert bound.upper - bound.lower < 1e-9


def feed(fed: Fed, seen: Sequence[bool]) -> Fed:
    for disagreed in seen:
        fed.observe(disagreed)
    return fed


# The guard.


def checks_until_off(guard: ReuseGuard, seen: Sequence[bool]) -> int | None:
    for number, disagreed in enumerate(seen, start=1):
        guard.observe(disagreed)
        if not guard.allowed:
            return number
    return None


def test_a_rate_of_one_half_is_noticed_within_a_few_checks() -> None:
    alternating = list(itertools.islice(itertools.cycle([False, True]), 100))
    assert checks_until_off(ReuseGuard(0.05), alternating) == 6
    rng = random.Random(3)
    needed = [checks_until_off(ReuseGuard(0.05), [rng.random() < 0.5 for _ in range(100)]) for _ in range(500)]
    assert all(number is not None and number <= 19 for number in needed)


def test_a_rate_below_the_tolerated_one_is_left_alone() -> None:
    rng = random.Random(1)
    guard = ReuseGuard(0.02)
    assert checks_until_off(guard, [rng.random() < 0.01 for _ in range(2000)]) is None
    assert guard.reason is None
    assert guard.bound.checked == 2000


def test_it_switches_off_exactly_when_the_lower_bound_passes_the_tolerated_share() -> None:
    rng = random.Random(4)
    guard, bound = ReuseGuard(0.1), DisagreementBound()
    while guard.allowed:
        assert bound.lower <= 0.1
        disagreed = rng.random() < 0.2
        guard.observe(disagreed)
        bound.observe(disagreed)
    assert bound.lower > 0.1


def test_it_stays_off_until_reset_and_then_starts_again() -> None:
    guard = feed(ReuseGuard(0.05), [True] * 10)
    reason = guard.reason
    assert reason is not None
    assert "allow_non_prefix_reuse()" in reason
    feed(guard, [False] * 5000)
    assert (guard.allowed, guard.reason) == (False, reason)
    guard.reset()
    assert (guard.allowed, guard.bound) == (True, DisagreementBound())


def test_one_disagreement_is_proof_where_none_is_tolerated() -> None:
    guard = feed(ReuseGuard(0), [False] * 1000)
    assert guard.allowed
    guard.observe(True)
    assert not guard.allowed


def test_a_first_disagreement_proves_a_share_of_one_in_forty() -> None:
    assert at(1, 1).lower == pytest.approx(0.025)
    assert feed(ReuseGuard(0.026), [True]).allowed
    assert not feed(ReuseGuard(0.024), [True]).allowed


def test_threads_lose_no_observation() -> None:
    guard = ReuseGuard(0.99)
    workers = [threading.Thread(target=feed, args=(guard, [False, True] * 500)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (guard.bound.checked, guard.bound.disagreements) == (8000, 4000)


@given(counts=counts, share=st.floats(0.001, 0.999), confidence=st.sampled_from([0.5, 0.95, 0.999]))
def test_a_share_is_excluded_exactly_outside_the_bounds(
    counts: tuple[int, int], share: float, confidence: float
) -> None:
    disagreed, checked = counts
    bound = at(disagreed, checked, confidence)
    if min(abs(share - bound.lower), abs(share - bound.upper)) > 1e-9:
        assert bound.excludes(share) == (not bound.lower < share < bound.upper)
