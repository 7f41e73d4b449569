from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvboost.core.keys import common_prefix, token_array
from kvboost.explain.differences import aligned_runs

_TEXTS = st.lists(st.sampled_from([list(range(n, n + 20)) for n in (0, 100, 200, 300)] + [[7], [8, 9]]), max_size=8)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(_TEXTS, _TEXTS)
def test_runs_are_equal_text_in_the_order_of_both(one: list[list[int]], other: list[list[int]]) -> None:
    here, there = (token_array(list(chain.from_iterable(text))) for text in (one, other))
    start = common_prefix(here, there)
    assert list(here[:start]) == list(there[:start])
    at = behind = start
    for run in aligned_runs(here, there, start=start):
        assert run.here >= at
        assert run.there >= behind
        assert run.tokens >= 12
        at, behind = run.here + run.tokens, run.there + run.tokens
        assert np.array_equal(here[run.here : at], there[run.there : behind])


def test_a_replaced_value_leaves_the_rest_aligned() -> None:
    here, there = token_array([1, 2, 3, *range(50, 90)]), token_array([1, 7, 8, 9, *range(50, 90)])
    assert aligned_runs(here, there, start=1) == [(3, 4, 40)]


def test_the_nearest_of_equal_texts_is_taken() -> None:
    text = list(range(50, 70))
    here, there = token_array([1, *text]), token_array([2, *text, 3, 4, *text])
    assert aligned_runs(here, there, start=0) == [(1, 1, 20)]
