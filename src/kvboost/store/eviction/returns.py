"""When blocks come back: learnt while they do, kind by kind, from what is stored and from what was evicted.

Used by :mod:`kvboost.store.eviction.expected`. A *kind* is a group of blocks that are expected to behave alike. For
every kind and every span of age there is the chance that a block which reached that age comes back within the span,
estimated as actuaries do it: returns over blocks at risk, where one still inside the span counts half. Invariant:
what is watched goes on being watched after its eviction, so the estimate does not depend on what was evicted.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_PER_OCTAVE = 3  # spans of age for each doubling; with 2, what is about to be evicted is told apart too late
SPANS = 48  # the last begins at 2 ** 15.7 prompts
_MEMORY = 0.9995  # per prompt: what was seen 2,000 prompts ago counts 0.37
_REFIT = 100  # prompts after which a kind's table is rebuilt
_OWN_COUNTS = (6.0, 4.0, 10.0, 20.0)  # blocks at risk from which on a level weighs more than the one above it
INSIDE = 2  # chunks behind it in its prompt: this many or more
_MAX_WATCHED = 16384  # more than are stored or remembered as ghosts: of larger stores a part is watched

_ENDS = [2 ** (span / _PER_OCTAVE) for span in range(SPANS)]
_WIDTHS = [_ENDS[0], *(_ENDS[span] - _ENDS[span - 1] for span in range(1, SPANS))]
_NONE = [0.0] * SPANS
# Before anything is known the chance falls with age, so that the order is that of LRU.
_AT_FIRST = [min(0.5, 0.3 * width / end) / 3 for width, end in zip(_WIDTHS, _ENDS, strict=True)]


class Kind:
    """Counts of one group of blocks; where they are few, the group above it speaks."""

    __slots__ = ("_chances", "_fitted", "_index", "_level", "above", "returned", "stayed", "within")

    def __init__(self, above: Kind | None) -> None:
        self.above = above
        # Arrays: there may be thousands of kinds, and lists of floats would take four times the memory.
        self.returned = array("d", _NONE)
        self.stayed = array("d", _NONE)
        self.within = [0] * SPANS
        """Watched blocks that are in the span now."""
        self._level: int = 0 if above is None else above._level + 1
        self._fitted = -_REFIT
        self._chances = array("d")
        self._index = array("d")

    def index(self, now: int, weight: float) -> Sequence[float]:
        """For each span of age: the most returns per prompt of waiting that a block of this age promises."""
        if now - self._fitted >= _REFIT:
            self._fit(now, weight)
        return self._index

    def _fit(self, now: int, weight: float) -> None:
        if self.above is None:
            known: Sequence[float] = _AT_FIRST
        else:
            self.above.index(now, weight)
            known = self.above._chances
        prior = _OWN_COUNTS[self._level] * weight
        half = 0.5 * weight
        chances = [
            (returned + prior * chance) / (returned + stayed + half * within + prior)
            for returned, stayed, within, chance in zip(self.returned, self.stayed, self.within, known, strict=True)
        ]
        self._chances, self._index = array("d", chances), array("d", best_rates(chances))
        self._fitted = now

    def forget(self, factor: float) -> None:
        """Multiply every count, when the weight of a new one has grown too large a number."""
        self.returned = array("d", (count * factor for count in self.returned))
        self.stayed = array("d", (count * factor for count in self.stayed))


def best_rates(chances: list[float]) -> list[float]:
    """Returns per prompt of waiting, from each span on, for the best time to give up (the Gittins index).

    Waiting on is worth its while if what comes later is denser: after a pause for thought, say. From the last span
    back, a span is joined with the one behind it for as long as that raises its rate.
    """
    rates = [0.0] * len(chances)
    joined: list[tuple[float, float, float]] = []  # expected returns, expected waiting, chance of neither
    for span in range(len(chances) - 1, -1, -1):
        chance = chances[span]
        returns, waiting, left = chance, _WIDTHS[span] * (1 - chance / 2), 1 - chance
        while joined and joined[-1][0] * waiting > returns * joined[-1][1]:
            later_returns, later_waiting, later_left = joined.pop()
            returns += left * later_returns
            waiting += left * later_waiting
            left *= later_left
        joined.append((returns, waiting, left))
        rates[span] = returns / waiting
    return rates


def rate_at(index: Sequence[float], age: int) -> float:
    """``index`` at ``age``, straight between the middles of its spans: equal ages aside, no two blocks tie."""
    if age < 1:
        return index[0]
    place = math.log2(age) * _PER_OCTAVE + 0.5
    span = int(place)
    if span >= SPANS - 1:
        return index[-1]
    return index[span] + (place - span) * (index[span + 1] - index[span])


@dataclass(slots=True, eq=False)
class Block:
    """A key, stored or evicted not long ago."""

    key: bytes
    content: bytes | None
    kind: Kind
    watched: bool
    uses: int = 0
    """How often it was found, or stored again."""
    mean: float = 0.0
    """Prompts between its uses, the last ones most."""
    time: int = 0
    span: int = -1
    """The span of age it is counted in, -1 if it is not watched now."""
    parent: Block | None = None
    children: int = 0
    place: int = -1
    """Among the leaves."""
    position: int = 0
    """In the prompt it was stored for."""
    placed: bool = False
    behind: int = INSIDE
    turned_away: bool = False
    """Refused the last time, and so was unseen all that followed it."""

    def came_back(self, now: int) -> None:
        """One more use, after so many prompts."""
        away = now - self.time
        self.mean = (self.mean + away) / 2 if self.uses else away
        self.uses += 1
        self.behind = INSIDE


class Watch:
    """Follows blocks from their last use until they come back or are too old. At most 16,384 at a time."""

    def __init__(self) -> None:
        self.now = 0
        self.weight = 1.0
        """Of a count made now. It grows, which is cheaper than letting all others shrink."""
        self.everything = Kind(None)
        self._spans: list[deque[tuple[Block, int]]] = [deque() for _ in range(SPANS - 1)]
        self._watched = 0  # entries in the queues, outdated ones included

    def tick(self) -> float | None:
        """One more prompt. A number if all counts must be multiplied by it now: the caller has the kinds."""
        self.now += 1
        self.weight /= _MEMORY
        for span, queue in enumerate(self._spans):
            # Blocks enter every queue in the order of their last use, so the oldest are in front.
            while queue and self.now - queue[0][1] >= _ENDS[span]:
                block, time = queue.popleft()
                if block.span != span or block.time != time:
                    self._watched -= 1
                    continue
                self._count(block, stayed=True)
                if span + 1 < SPANS - 1:
                    block.span = span + 1
                    self._enter(block.kind, span + 1, 1)
                    self._spans[span + 1].append((block, time))
                else:
                    self._watched -= 1
        if self.weight < 1e12:
            return None
        factor, self.weight = 1 / self.weight, 1.0
        return factor

    def start(self, block: Block) -> None:
        """``block`` was used now and is waited for."""
        block.span = 0
        self._enter(block.kind, 0, 1)
        self._spans[0].append((block, block.time))
        self._watched += 1
        if self._watched > _MAX_WATCHED:
            self._give_up_oldest()

    def came_back(self, block: Block) -> None:
        """``block`` is used again; counts it if it was watched."""
        if block.span >= 0:
            self._count(block, stayed=False)

    def change_kind(self, block: Block, kind: Kind) -> None:
        """More is known about ``block`` than when its watch began."""
        if block.span >= 0:
            self._enter(block.kind, block.span, -1)
            self._enter(kind, block.span, 1)
        block.kind = kind

    def _give_up_oldest(self) -> None:
        queue = next(queue for queue in reversed(self._spans) if queue)
        block, time = queue.popleft()
        self._watched -= 1
        if block.time == time and block.span >= 0:
            self._enter(block.kind, block.span, -1)
            block.span = -1

    def _count(self, block: Block, *, stayed: bool) -> None:
        span, block.span = block.span, -1
        kind: Kind | None = block.kind
        while kind is not None:
            (kind.stayed if stayed else kind.returned)[span] += self.weight
            kind.within[span] -= 1
            kind = kind.above

    def _enter(self, kind: Kind | None, span: int, change: int) -> None:
        while kind is not None:
            kind.within[span] += change
            kind = kind.above
