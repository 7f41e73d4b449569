"""Where forward steps may begin and end, so that KV has the bits of a cold run.

Chosen by :mod:`kvboost.hf.numerics` for a model on its device; used by the prefill. A chunk is stored, a step is
computed at once. Invariant: under a bitwise rule the bits of a position depend on the tokens up to it alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal

Numerics = Literal["bitwise", "fast"]
MaskedSteps = Literal["none", "later", "all"]
_MASK_ELEMENTS = 2**26
_FEWEST = 256  # tokens; shorter steps stream the weights too often


def largest_mask(positions: int) -> int:
    """The most elements that the mask of a step has, among so many positions."""
    return max(_MASK_ELEMENTS, _FEWEST * positions)


@dataclass(frozen=True)
class StepRule:
    """The steps of one model on one device."""

    max_tokens: int
    """The longest step."""
    grid: int | None = None
    """Steps begin and end at multiples of this, and only such steps have the bits of a cold run. None: any step has."""
    numerics: Numerics = "bitwise"
    """``"fast"``: steps begin where the reused KV ends. That is exact up to rounding, not to the bit."""
    masked: MaskedSteps = "none"
    """Which steps have a mask of their tokens by all positions: ``"later"``, those behind other tokens."""

    @property
    def spec(self) -> str:
        """Names what the bits depend on."""
        return f"{self.numerics}:{self.grid or 'any'}"

    @property
    def is_bitwise(self) -> bool:
        """Whether stored KV has the bits of a cold run."""
        return self.numerics == "bitwise"

    def resume(self, position: int) -> int:
        """Where computing starts if KV up to ``position`` is stored."""
        return position // self.grid * self.grid if self.grid else position

    def step_end(self, start: int, limit: int) -> int:
        """Where a step that begins at ``start`` ends, at ``limit`` at the latest."""
        if self.grid:
            return min((start // self.grid + 1) * self.grid, limit)
        longest = self.max_tokens
        if self.masked == "all" or (self.masked == "later" and start):
            # The most rows with rows * (start + rows) <= _MASK_ELEMENTS.
            longest = min(longest, max(_FEWEST, (isqrt(start * start + 4 * _MASK_ELEMENTS) - start) // 2))
        return min(start + longest, limit)

    def keeps_bits(self, start: int, end: int) -> bool:
        """Whether a step over these positions may be stored: each has the bits it has in every other run."""
        if self.grid is None:
            return True
        return start % self.grid == 0 and end - start == self.grid

    def count(self, tokens: int) -> int:
        """How many steps compute a prompt of this length."""
        steps = end = 0
        while end < tokens:
            end = self.step_end(end, tokens)
            steps += 1
        return steps

    def last_step(self, start: int, end: int) -> int:
        """Where the last of the steps from ``start`` to ``end`` begins."""
        following = self.step_end(start, end)
        while following < end:
            start, following = following, self.step_end(following, end)
        return start
