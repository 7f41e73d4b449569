from __future__ import annotations

import random

from kvboost.bench.capacity import hit_rates


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
