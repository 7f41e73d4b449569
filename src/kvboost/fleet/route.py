"""Which replica a request goes to: the one from which its first token is expected soonest.

Used by the request router of a fleet and by the simulator. Counted are the seconds for what a replica has in memory,
loads and computes, its queue, and what the new tokens evict of others. Invariants: holding more or waiting less never
makes a replica less likely; the chosen one's queue is longer than the shortest by no more than what it saves, so a hot
document spreads as soon as waiting for it takes longer than that.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvboost.core.costs import CostModel
from kvboost.core.keys import key_pairs
from kvboost.errors import ConfigError
from kvboost.extend import TokenArray
from kvboost.fleet.index import FleetIndex, Holders, ShortKeys, short_keys

_Floats = npt.NDArray[np.float64]
_ALL = ~np.uint64(0)
_REMEMBERED = 32  # requests of each replica by which its memory's turnover is judged
_NEEDED_AGAIN = 0.25  # of what is evicted: more finds more in memory, and lets requests wait longer for it
_MOST_TURNOVER = 2.0  # times the mean that count, so that waiting for memory has an end
_NOTHING = 1e-9  # tokens


@dataclass(frozen=True)
class RoutePrompt:
    """What a router needs of a prompt. Made once per request, however often it is routed."""

    prefix_keys: ShortKeys
    content_keys: ShortKeys
    chunk_tokens: _Floats
    prompt_tokens: int

    @classmethod
    def of(cls, root: bytes, tokens: TokenArray, ends: Sequence[int]) -> RoutePrompt:
        """Of a prompt that is cut at ``ends``; the tokens behind the last one are computed wherever it goes."""
        pairs = list(key_pairs(root, tokens, ends))
        prefix, content = (short_keys([pair[which] for pair in pairs]) for which in (0, 1))
        lengths = np.diff(np.array(ends, dtype=np.float64), prepend=0.0)
        return cls(prefix, content, lengths, len(tokens))


@dataclass(frozen=True)
class RouteCosts:
    """Seconds per token on any replica of the fleet. Only their ratios matter where no replica has a queue."""

    compute: float
    """Prefill of a token that is nowhere."""
    move: float
    """Reposition a token that is in memory behind other text, with its share of recomputed ones."""
    load: float = float("inf")
    """Bring a token's KV in from the shared tier: its bytes over the bandwidth. Infinite without such a tier."""
    place: float = 0.0
    """Use a token that is in memory where it stands."""

    def __post_init__(self) -> None:
        if not (self.compute > 0.0 and 0.0 <= self.place <= min(self.move, self.load)):
            raise ConfigError(
                "compute must be above 0, and place from 0 up to move and load: what is in place is the cheapest; got "
                f"compute={self.compute}, move={self.move}, load={self.load}, place={self.place}"
            )

    @classmethod
    def of(cls, model: CostModel, *, recompute_ratio: float, load: float = float("inf")) -> RouteCosts:
        """What an engine has learnt from its requests. ``load`` is measured at the shared tier."""
        compute = model.prefill_seconds(forwards=0, tokens=1)
        move = model.reposition_seconds(1) + recompute_ratio * model.repair_factor * compute
        return cls(compute, move, load)

    @classmethod
    def median(cls, measured: Iterable[RouteCosts]) -> RouteCosts:
        """What is typical of several replicas. One that has loaded nothing yet says nothing about loading."""
        each = list(measured)
        finite = [costs.load for costs in each if math.isfinite(costs.load)]
        compute, move, place = (
            statistics.median_low(getattr(costs, name) for costs in each) for name in ("compute", "move", "place")
        )
        return cls(compute, move, statistics.median_low(finite) if finite else math.inf, place)


@dataclass(frozen=True)
class Expected:
    """What a request would take on each replica, in the order they were asked for."""

    seconds: _Floats
    exact: _Floats
    """Tokens in its memory, as they stand."""
    moved: _Floats
    """Tokens in its memory, behind other text."""
    loaded: _Floats
    """Tokens that the shared tier holds and its memory does not, where loading is faster than computing."""
    computed: _Floats


@dataclass(frozen=True)
class Choice:
    """Where a request goes, and what is expected there."""

    replica: str
    seconds: float
    """Until its first token, without the queue."""
    queue_seconds: float
    known: bool
    """False if nobody is known to hold anything of the prompt: then one of two drawn, with the shorter queue."""


class Router:
    """Chooses replicas by what they hold and how long their queues are. Belongs to one event loop, as its index."""

    def __init__(self, index: FleetIndex, costs: RouteCosts, *, shared: str | None = None, seed: int = 0) -> None:
        """``shared`` is the name under which the index knows what the shared tier holds."""
        self.index = index
        self.costs = costs
        self._shared = shared
        self._random = random.Random(seed)
        self._brought: dict[str, float] = {}
        """Tokens that each replica was sent and did not hold, the latest counting most."""

    def choose(self, prompt: RoutePrompt, *, queues: Mapping[str, float], approximate: bool = True) -> Choice:
        """One of the replicas in ``queues``: the seconds until each could begin.

        ``approximate`` says whether the request may use text behind other text.
        """
        if not queues:
            raise ConfigError("there is no replica to choose from; wait until one is ready")
        names = list(queues)
        expected = self.expect(prompt, replicas=names, approximate=approximate)
        seconds = expected.seconds
        total = seconds + np.fromiter(queues.values(), dtype=np.float64, count=len(names))
        known = bool((expected.computed < prompt.prompt_tokens).any())
        if known:
            total += self._evicted_seconds(names, expected)
            chosen = self._random.choice(np.flatnonzero(total == total.min()).tolist())
        else:
            # Of all of them the shortest would be the same for every router, until the queues are heard of again.
            two = self._random.sample(range(len(names)), min(2, len(names)))
            chosen = min(two, key=lambda number: float(total[number]))
        self._count(names[chosen], float(expected.computed[chosen] + expected.loaded[chosen]), of=len(names))
        return Choice(
            replica=names[chosen],
            seconds=float(seconds[chosen]),
            queue_seconds=queues[names[chosen]],
            known=known,
        )

    def _evicted_seconds(self, names: Sequence[str], expected: Expected) -> _Floats:
        """What others will compute again because this request takes memory: more where memory turns over faster.

        At the mean turnover a quarter of what is evicted counts as computed again by somebody.
        Without it a fleet that is not busy sends everything to whoever holds the prompts' common beginning, and the
        memory of the others stays empty.
        """
        brought = np.fromiter((self._brought.get(name, 0.0) for name in names), dtype=np.float64, count=len(names))
        mean = brought.mean()
        if not mean:
            return brought
        turnover: _Floats = np.minimum(brought / mean, _MOST_TURNOVER)
        evicted: _Floats = _NEEDED_AGAIN * self.costs.compute * (expected.computed + expected.loaded) * turnover
        return evicted

    def _count(self, name: str, tokens: float, *, of: int) -> None:
        fades = 1.0 / (1.0 + 1.0 / (_REMEMBERED * of))
        faded = {other: fades * count for other, count in self._brought.items() if count > _NOTHING}  # others are gone
        self._brought = {**faded, name: faded.get(name, 0.0) + tokens}

    def expect(self, prompt: RoutePrompt, *, replicas: Sequence[str], approximate: bool = True) -> Expected:
        """What the prompt would take on each of ``replicas``, were they idle."""
        costs, tokens = self.costs, prompt.chunk_tokens
        bits = [self.index.bit_of(name) for name in replicas]
        prefix = self.index.holders(prompt.prefix_keys)
        content = self.index.holders(prompt.content_keys) if approximate else np.zeros_like(prefix)
        shared_prefix, shared_content = self._shared_by_all(prefix), self._shared_by_all(content)
        # Whose run of exact chunks reaches each one: what the tier shares reaches everybody.
        run: Holders = np.bitwise_and.accumulate(prefix | shared_prefix)
        if None in bits:  # of a replica that is new nothing is known, but it can load what all can
            nobody = np.zeros_like(run[:, :1])
            prefix, content = np.hstack((prefix, nobody)), np.hstack((content, nobody))
            run = np.hstack((run, np.bitwise_and.accumulate(shared_prefix)))
        # Each chunk comes from the cheapest place it is in: exact, moved, loaded, loaded and moved.
        kinds = [
            (costs.place, run & prefix),
            (costs.move, content),
            (costs.load, run & shared_prefix),
            (costs.load + costs.move, shared_content),
        ]
        found = np.zeros((len(kinds), len(replicas)))
        unclaimed = np.full_like(prefix, _ALL)
        for number in sorted(range(len(kinds)), key=lambda number: kinds[number][0]):
            seconds, where = kinds[number]
            if seconds < costs.compute and where.any():
                found[number] = _tokens_held(where & unclaimed, tokens, bits)
                unclaimed &= ~where
        computed = prompt.prompt_tokens - found.sum(axis=0)
        spent = [seconds * row for (seconds, _), row in zip(kinds, found, strict=True) if row.any()]
        return Expected(
            seconds=computed * costs.compute + sum(spent),
            exact=found[0],
            moved=found[1],
            loaded=found[2] + found[3],
            computed=computed,
        )

    def _shared_by_all(self, held: Holders) -> Holders:
        """All bits of the chunks that the shared tier holds: [chunks, 1]."""
        number = self.index.bit_of(self._shared) if self._shared is not None else None
        if number is None:
            return np.zeros((len(held), 1), dtype=np.uint64)
        bit = (held[:, number // 64] >> np.uint64(number % 64)) & np.uint64(1)
        return (bit * _ALL)[:, None]


def _tokens_held(held: Holders, tokens: _Floats, bits: Sequence[int | None]) -> _Floats:
    """How many tokens each of these replicas holds. None is the last bit, which belongs to no replica."""
    octets = held.astype("<u8").view(np.uint8)
    if None not in bits:
        octets = octets[:, : max(bit or 0 for bit in bits) // 8 + 1]  # the replicas that there are
    held_bits = np.unpackbits(octets, axis=1, bitorder="little").astype(np.float32)  # [chunks, replicas]
    # Whole numbers are exact in float32 up to 16 million tokens.
    return (tokens.astype(np.float32) @ held_bits)[[-1 if bit is None else bit for bit in bits]].astype(np.float64)
