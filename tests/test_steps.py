"""Steps begin and end where the rule of the model's numerics says."""

from __future__ import annotations

from typing import get_args

from hypothesis import example, given
from hypothesis import strategies as st

from kvboost.steps import MaskedSteps, StepRule, largest_mask

rules = st.one_of(
    st.builds(StepRule, st.integers(1, 50)),
    st.integers(1, 50).map(lambda grid: StepRule(grid, grid)),
    st.builds(StepRule, st.integers(1, 50), numerics=st.just("fast")),
)


@given(rules, st.integers(0, 200), st.integers(1, 200))
def test_steps_cover_a_prompt_and_the_last_one_is_found(rule: StepRule, known: int, more: int) -> None:
    end, start = known + more, rule.resume(known)
    assert start <= known
    ends = [start]
    while ends[-1] < end:
        ends.append(rule.step_end(ends[-1], end))
        assert ends[-2] < ends[-1] <= ends[-2] + rule.max_tokens
    assert rule.last_step(start, end) == ends[-2]
    if start == 0:
        assert rule.count(end) == len(ends) - 1


@given(st.integers(1, 50), st.integers(0, 500))
def test_on_a_grid_stored_steps_are_those_of_a_cold_run(grid: int, known: int) -> None:
    rule = StepRule(grid, grid)
    start = rule.resume(known)
    assert start % grid == 0
    assert known - start < grid
    assert rule.keeps_bits(start, start + grid)
    assert not rule.keeps_bits(start, start + grid - 1) or grid == 1
    assert not rule.keeps_bits(start + 1, start + 1 + grid) or grid == 1


def test_numerics_are_part_of_the_key() -> None:
    assert len({StepRule(8).spec, StepRule(8, 8).spec, StepRule(16, 16).spec, StepRule(8, numerics="fast").spec}) == 4
    assert StepRule(8).spec == StepRule(16).spec, "the length of a step changes no bit"


@given(st.sampled_from(get_args(MaskedSteps)), st.integers(1, 1 << 14), st.just(0) | st.integers(1, 1 << 20))
@example("none", 1 << 14, 1 << 20)
@example("later", 1 << 14, 0)
@example("later", 1 << 14, 1)
@example("all", 1 << 14, 0)
def test_only_a_step_with_a_mask_is_shorter_and_its_mask_is_bounded(
    masked: MaskedSteps, longest: int, start: int
) -> None:
    rows = StepRule(longest, masked=masked).step_end(start, 1 << 30) - start
    if masked == "none" or (masked == "later" and start == 0):
        assert rows == longest
        return
    assert rows * (start + rows) <= largest_mask(start + rows)
    assert rows in (longest, 256) or (rows + 1) * (start + rows + 1) > 2**26, "no shorter than it must be"
