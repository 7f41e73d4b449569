from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from kvboost.approx.select import STRATEGIES, Auto, CacheBlend, make_strategy
from kvboost.approx.setup import choose_repairs
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.extend import RepairSituation, RepairStrategy


def situation(lengths: list[int], *, ratio: float = 0.25, gap: int = 5, seed: int = 0) -> RepairSituation:
    """Spans of these lengths, ``gap`` positions apart, with random signals."""
    generator = torch.Generator().manual_seed(seed)
    positions, starts, ends, at = [], [], [], 10
    for length in lengths:
        positions += range(at, at + length)
        starts += [at] * length
        ends += [at + length] * length
        at += length + gap
    noise = [torch.rand(len(positions), generator=generator) for _ in range(3)]
    return RepairSituation(
        layer=2,
        layer_count=12,
        positions=torch.tensor(positions),
        span_starts=torch.tensor(starts),
        span_ends=torch.tensor(ends),
        budget=round(ratio * len(positions)),
        attention=noise[0],
        key_change=noise[1],
        value_change=noise[2],
    )


@pytest.mark.parametrize("name", STRATEGIES)
@given(lengths=st.lists(st.integers(1, 80), min_size=1, max_size=6), ratio=st.floats(0.0, 1.0), seed=st.integers(0, 99))
def test_choices_are_ascending_positions_that_exist(name: str, lengths: list[int], ratio: float, seed: int) -> None:
    given_situation = situation(lengths, ratio=ratio, seed=seed)
    strategy = STRATEGIES[name]
    chosen = strategy.choose(given_situation)
    assert torch.equal(chosen, chosen.unique())
    assert len(chosen) == 0 or (chosen[0] >= 0 and chosen[-1] < len(given_situation.positions))
    assert torch.equal(chosen, strategy.choose(given_situation)), "the same situation, the same positions"
    assert len(chosen) <= given_situation.budget + len(lengths)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("layers", [1, 2, 3, 30, 80])
def test_requested_layers_exist(name: str, layers: int) -> None:
    strategy = STRATEGIES[name]
    watched, decisions = strategy.attention_layers(layers), strategy.decision_layers(layers)
    assert all(0 <= layer < layers for layer in watched)
    assert list(decisions) == sorted(set(decisions))
    assert all(0 <= layer < layers for layer in decisions)


def test_the_known_ways_choose_what_their_names_say() -> None:
    given_situation = situation([8, 16], ratio=0.25)
    assert STRATEGIES["none"].choose(given_situation).tolist() == []
    changed = replace(given_situation, value_change=torch.arange(24.0), attention=-torch.arange(24.0))
    assert CacheBlend().choose(changed).tolist() == list(range(18, 24))


def test_a_strategy_is_found_by_name_or_taken_as_it_is() -> None:
    assert make_strategy("even").name == "even"
    own = Auto(neighbours=1)
    assert make_strategy(own) is own
    assert isinstance(own, RepairStrategy)
    with pytest.raises(ConfigError, match="'guess' is not known; use one of"):
        make_strategy("guess")
    for left in ("first", "query", "selective"):
        with pytest.raises(ConfigError, match=r"benchmarks/common/strategies\.py .* copy its class"):
            make_strategy(left)
    with pytest.raises(ConfigError, match=r"give an object of it: Auto\(\)"):
        make_strategy(Auto)
    with pytest.raises(ConfigError, match="int lacks name, spreads"):
        make_strategy(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "name", "ratio"),
    [
        ({"recompute_strategy": "even", "recompute_ratio": 0.4}, "even", 0.4),
        ({"quality": "fast"}, None, None),
        ({}, None, None),
        ({"quality": 0.03}, None, None),
    ],
)
def test_settings_become_a_way_of_repairing(settings: dict[str, Any], name: str | None, ratio: float | None) -> None:
    [repair] = choose_repairs(EngineConfig(**{"quality": "high", **settings}))
    assert name is None or repair.strategy.name == name
    assert ratio is None or repair.ratio == ratio
    assert 0.0 < repair.ratio <= 1.0


def test_exact_means_nothing_moves_and_high_repairs_more_than_fast() -> None:
    assert choose_repairs(EngineConfig(quality="exact")) == ()
    assert choose_repairs(EngineConfig(quality=0)) == ()
    [high], [fast] = (choose_repairs(EngineConfig(quality=level)) for level in ("high", "fast"))
    assert str(fast) == "cacheblend, 15% of the positions recomputed, and all of them in the first 2 layers"
    [llama] = choose_repairs(EngineConfig(quality="fast"), family="llama")
    assert str(llama) == "auto, 15% of the positions recomputed"
    assert high.ratio > fast.ratio
    assert high.strategy.name == fast.strategy.name == "cacheblend", "a family that was not measured"
    [llama] = choose_repairs(EngineConfig(quality="high"), family="llama")
    [given] = choose_repairs(EngineConfig(quality="high", recompute_strategy="even"), family="llama")
    [gemma] = choose_repairs(EngineConfig(quality="fast"), family="gemma3_text")
    assert (llama.strategy.name, gemma.strategy.name, given.strategy.name) == ("auto", "auto", "even")
    tried = choose_repairs(EngineConfig(quality="auto"), family="qwen2")
    assert [one.strategy.name for one in tried] == ["none", "cacheblend", "cacheblend"]


@given(length=st.integers(1, 300), ratio=st.floats(0.0, 1.0))
def test_an_even_sample_has_even_distances_and_the_whole_budget(length: int, ratio: float) -> None:
    given_situation = situation([length], ratio=ratio)
    chosen = STRATEGIES["even"].choose(given_situation)
    assert len(chosen) == given_situation.budget
    distances = chosen.diff()
    assert len(distances) == 0 or int(distances.max() - distances.min()) <= 1
