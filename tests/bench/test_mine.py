"""What is recommended for which measurements."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.bench.mine import Tried, cache_bytes, recommend
from kvboost.bench.summary import Pairing, break_even, percentile
from kvboost.bench.workloads import Request


def tried(quality: str, *, ms: float, differing: int, count: int = 100) -> Tried:
    theirs: list[Any] = [{"ttft_ms": 100.0, "tokens": [1]} for _ in range(count)]
    own: list[Any] = [{"ttft_ms": ms, "tokens": [2 if n < differing else 1]} for n in range(count)]
    return Tried(quality, Pairing("mine", "plain", quality, [10] * count, theirs, own), 1000)


@pytest.mark.parametrize(
    ("exact_ms", "fast_ms", "differing", "count", "quality"),
    [
        (50.0, 20.0, 0, 100, "fast"),  # shown: at most 3 %
        (50.0, 20.0, 0, 20, "auto"),  # too few prompts to show it
        (50.0, 20.0, 4, 100, "auto"),  # within 5 %, but not shown to be
        (50.0, 20.0, 20, 100, "exact"),
        (50.0, 49.0, 0, 100, "exact"),  # not worth it
        (100.0, 20.0, 20, 100, None),
        (100.0, 99.0, 0, 100, None),
    ],
)
def test_what_is_recommended(exact_ms: float, fast_ms: float, differing: int, count: int, quality: str | None) -> None:
    settings = [
        tried("exact", ms=exact_ms, differing=0, count=count),
        tried("fast", ms=fast_ms, differing=differing, count=count),
    ]
    found = recommend(settings, tolerated=0.05, size=640 * 10**6)
    assert found.quality == quality
    text = found.text("./model")
    if quality is None:
        assert text.startswith("Recommendation: none.")
    else:
        assert text.endswith(f"kvboost serve ./model --quality {quality} --cache-bytes 640MB")


def test_the_cache_is_as_large_as_what_comes_again() -> None:
    head = list(range(1000))
    requests = [Request([*head, *range(2000 + n, 2040 + n)], "", [1000], True) for n in range(0, 400, 40)]
    small = cache_bytes(requests, None, per_token=100_000)
    assert small == 64 * 10**6 * -(-small // (64 * 10**6))
    assert 1000 * 100_000 < small < 2 * 1400 * 100_000


def test_break_even_is_the_shortest_length_from_which_on_ours_is_faster() -> None:
    pairing = tried("exact", ms=100.0, differing=0, count=4).pairing
    pairing.prompts[:] = [100, 200, 300, 400]
    for own, ms in zip(pairing.ours, (50.0, 150.0, 90.0, 50.0), strict=True):
        own["ttft_ms"] = ms  # type: ignore[index]
    assert break_even(pairing) == 300
    pairing.ours[-1]["ttft_ms"] = 200.0  # type: ignore[index]
    assert break_even(pairing) is None
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
