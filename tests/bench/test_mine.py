"""What is recommended for which measurements."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvboost.bench.compare import Pairing
from kvboost.bench.mine import Recommendation, Tried, cache_bytes, hit_rates, recommend
from kvboost.bench.workloads import Request


def tried(quality: str, *, ms: float, differing: int, count: int = 100, moved: int | None = None) -> Tried:
    """The first ``moved`` prompts reused text that had moved: all of them, if it is not given."""
    used = 0 if quality == "exact" else count if moved is None else moved
    theirs: list[Any] = [{"ttft_ms": 100.0, "tokens": [1]} for _ in range(count)]
    own: list[Any] = [
        {"ttft_ms": ms, "tokens": [2 if n < differing else 1], "moved": 10 * (n < used)} for n in range(count)
    ]
    return Tried(quality, Pairing("mine", quality, [10] * count, theirs, own), 1000)


def size(quality: str) -> int:
    return 640 * 10**6 if quality == "exact" else 1280 * 10**6


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
        (125.0, 111.0, 0, 100, None),  # faster than exact, and slower than plain
    ],
)
def test_what_is_recommended(exact_ms: float, fast_ms: float, differing: int, count: int, quality: str | None) -> None:
    settings = [
        tried("exact", ms=exact_ms, differing=0, count=count),
        tried("fast", ms=fast_ms, differing=differing, count=count),
    ]
    found = recommend(settings, tolerated=0.05, size=size)
    assert found.quality == quality
    text = found.text(["kvboost", "serve", "./model"])
    if quality is None:
        assert text.startswith("Recommendation: none.")
    else:
        megabytes = 640 if quality == "exact" else 1280
        flags = f"--quality {quality} --cache-bytes {megabytes}MB"
        assert f"\n\n  kvboost serve ./model {flags}\n\n" in text
        assert "the size comes from a replay" in text


def test_a_slower_setting_is_promising_where_the_fastest_changes_too_much() -> None:
    settings = [
        tried("exact", ms=50.0, differing=0, count=20),
        tried("high", ms=30.0, differing=0, count=20),
        tried("fast", ms=20.0, differing=15, count=20),
    ]
    found = recommend(settings, tolerated=0.05, size=size)
    assert found.quality == "auto"
    assert "high was 3.3x and changed 0 of 20 answers" in found.reason


def test_prompts_in_which_nothing_moved_show_nothing() -> None:
    exact = tried("exact", ms=50.0, differing=0)
    few = tried("fast", ms=20.0, differing=0, moved=20)
    assert few.changed() == (0, 20)
    assert recommend([exact, few], tolerated=0.05, size=size).quality == "auto"  # of 100, 20 say something
    none = tried("fast", ms=20.0, differing=0, moved=0)
    assert recommend([exact, none], tolerated=0.05, size=size).quality == "exact"


@pytest.mark.parametrize(("count", "quality"), [(71, "auto"), (72, "fast")])
def test_two_settings_share_the_chance_of_error(count: int, quality: str) -> None:
    slower = tried("high", ms=45.0, differing=count, count=count)
    settings = [tried("exact", ms=50.0, differing=0, count=count), slower]
    settings.append(tried("fast", ms=20.0, differing=0, count=count))
    assert recommend(settings, tolerated=0.05, size=size).quality == quality  # alone, 59 would do


def test_commands_are_quoted() -> None:
    text = Recommendation("fast", 640 * 10**6, "").text(["kvboost", "serve", "my model"])
    assert "kvboost serve 'my model' --quality fast --cache-bytes 640MB" in text


def test_the_cache_is_as_large_as_what_comes_again() -> None:
    head = list(range(1000))
    requests = [Request([*head, *range(2000 + n, 2040 + n)], [1000]) for n in range(0, 400, 40)]
    small = cache_bytes(requests, None, "exact", per_token=100_000)
    assert small == 64 * 10**6 * -(-small // (64 * 10**6))
    assert 1000 * 100_000 < small < 2 * 1400 * 100_000


def test_a_cache_for_moved_text_holds_that_text() -> None:
    text = list(range(1000))
    requests = [Request([5000 + n, *text], [1]) for n in range(8)]
    sizes = [cache_bytes(requests, None, quality, per_token=1_000_000) for quality in ("exact", "auto")]
    assert sizes[0] < 1000 * 1_000_000 < sizes[1]  # there is nothing that exact reuse would need a place for


def test_a_larger_cache_finds_more_until_everything_fits() -> None:
    rng = random.Random(0)
    heads = [[rng.randrange(1000) for _ in range(400)] for _ in range(4)]
    prompts = [([*heads[n % 4], *(rng.randrange(1000) for _ in range(40))], [400]) for n in range(16)]
    rates = hit_rates(prompts, None)
    found = [rate for _, rate in rates]
    assert found == sorted(found)
    assert found[0] < 0.1  # four heads in turn: the least recently used one is the next
    assert abs(found[-1] - 12 / 16 * 400 / 440) < 0.01


def test_a_prompt_finds_nothing_of_itself() -> None:
    assert [rate for _, rate in hit_rates([(list(range(500)), [])], None)][-1] == 0.0


def test_what_is_behind_other_text_is_not_found() -> None:
    text = list(range(500))
    prompts = [([7, *text], [1]), ([8, *text], [1])]
    assert hit_rates(prompts, None)[-1][1] == 0.0
    assert hit_rates(prompts, None, anywhere=True)[-1][1] > 0.4  # half of the tokens are the second prompt's


def test_text_that_moves_is_kept_once() -> None:
    rng = random.Random(0)
    passages = [[rng.randrange(1000) for _ in range(200)] for _ in range(6)]
    orders = [rng.sample(passages, 6) for _ in range(8)]
    prompts = [([token for one in order for token in one] + [7], [200 * n for n in range(1, 7)]) for order in orders]
    assert hit_rates(prompts, None)[-1][0] > 4000
    capacity, rate = hit_rates(prompts, None, anywhere=True)[-1]
    assert capacity <= 1200
    assert rate > 0.8  # seven of eight prompts


def test_of_a_prompt_that_does_not_fit_the_beginning_is_kept() -> None:
    prompt = (list(range(1000)), [])
    rates = dict(hit_rates([prompt] * 4, None))
    half = next(rate for capacity, rate in rates.items() if 450 < capacity < 550)
    assert 0.3 < half < 0.4  # of three prompts in four


def test_the_last_token_is_always_computed() -> None:
    prompt = ([*range(64), 7], [64, 65])
    assert hit_rates([prompt] * 2, None)[-1][1] <= 64 / 130
