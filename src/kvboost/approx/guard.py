"""How often non-prefix reuse changes an answer: an always-valid bound, and a switch that acts on it.

Called by the engine, which answers a sample of requests both ways and reports whether the first tokens differed.
Invariant: the bound may be read after every check. The probability that it is ever wrong, over all reads, is at most
``1 - confidence``. A fixed-sample interval breaks that promise once it is read repeatedly and acted upon.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvboost.errors import ConfigError

_HALVINGS = 64  # from [0, 1] down to 5e-20, below what a double next to a share of 1e-3 can tell apart


class Standing(NamedTuple):
    """What may be reused now, read at once."""

    allowed: bool
    trying: bool
    """Whether requests are answered exactly and checked, to find out."""
    rung: int
    """The repair that is in use or tried."""


@dataclass
class DisagreementBound:
    """A confidence sequence for the share of requests whose answer changes. Not thread-safe.

    For a true share p, the likelihood of the observations, averaged over shares drawn from Jeffreys' prior
    Beta(1/2, 1/2), divided by its likelihood under p, is a martingale that starts at 1. By Ville's inequality
    it ever reaches ``1 / (1 - confidence)`` with probability at most ``1 - confidence``. The interval is
    every p for which it has not: ``lower <= p <= upper`` holds at all times together with probability
    ``confidence``. One martingale watches both sides, so the error is not split between them.

    This needs a share that stays the same, and checks chosen without regard to their outcome: those that
    :mod:`kvboost.approx.shadow` makes are nearly so, see docs/decisions/0023-earned.md. The bounds depend on the two
    counts only, not on the order of the observations.
    """

    confidence: float = 0.95
    checked: int = field(default=0, kw_only=True)
    disagreements: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _check_share("confidence", self.confidence, above_zero=True)
        for name, count in (("checked", self.checked), ("disagreements", self.disagreements)):
            if not isinstance(count, int) or isinstance(count, bool):
                raise ConfigError(f"{name} must be a whole number, got {count!r}")
        if not 0 <= self.disagreements <= self.checked:
            raise ConfigError(
                f"disagreements must lie in 0..checked, got {self.disagreements} of {self.checked}; "
                "start with a new bound if the counts are lost"
            )

    def observe(self, disagreed: bool) -> None:
        """Count one checked request."""
        self.checked += 1
        self.disagreements += bool(disagreed)

    @property
    def upper(self) -> float:
        """The true share is below this; 1.0 before the first agreement."""
        if self.disagreements == self.checked:
            return 1.0
        return self._edge(outside=1.0)

    @property
    def lower(self) -> float:
        """The true share is above this; 0.0 before the first disagreement."""
        if self.disagreements == 0:
            return 0.0
        return self._edge(outside=0.0)

    def excludes(self, share: float) -> bool:
        """Whether ``share`` (above 0 and below 1) lies outside the interval. Cheaper than either bound."""
        agreements = self.checked - self.disagreements
        return self.disagreements * math.log(share) + agreements * math.log1p(-share) <= self._limit()

    def _limit(self) -> float:
        """The log-likelihood at and below which a share is excluded."""
        agreements = self.checked - self.disagreements
        # B(s + 1/2, f + 1/2) / B(1/2, 1/2): the averaged likelihood. B(1/2, 1/2) is pi.
        averaged = (
            math.lgamma(self.disagreements + 0.5)
            + math.lgamma(agreements + 0.5)
            - math.lgamma(self.checked + 1.0)
            - math.log(math.pi)
        )
        return averaged + math.log(1.0 - self.confidence)

    def _edge(self, *, outside: float) -> float:
        """Where the interval ends between the observed share and ``outside``, which is excluded."""
        inside = self.disagreements / self.checked  # never excluded: an average is at most the largest likelihood
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            if middle in (inside, outside):
                break
            if self.excludes(middle):
                outside = middle
            else:
                inside = middle
        return outside  # the excluded end: rounding may widen the interval, never narrow it


@dataclass
class ReuseGuard:
    """Switches non-prefix reuse off once it is proven worse than tolerated. Thread-safe.

    Guaranteed: while the share of answers that reuse changes is the same from check to check and at most
    ``tolerated``, the guard ever switches off with probability at most ``1 - confidence``, however long
    it runs. If the share is above ``tolerated``, it switches off sooner or later: the sooner, the larger the excess.

    Not guaranteed: anything about a single request, since the share is an average; anything about
    traffic that changes, since a long good past outweighs a bad present for a while; that the share is
    below ``tolerated`` while the guard allows reuse, since lack of proof is no proof (read ``bound.upper`` for
    that). Each ``reset`` starts a new guarantee with its own false alarm. There is no minimum number of checks:
    at 95 % confidence and a tolerated share below 2.5 %, one disagreement in the very first check is proof enough.
    """

    tolerated: float
    confidence: float = field(default=0.95, kw_only=True)
    _bound: DisagreementBound = field(init=False, repr=False)
    _reason: str | None = field(init=False, repr=False, default=None)
    _lock: threading.Lock = field(init=False, repr=False, compare=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        _check_share("tolerated", self.tolerated)
        self._bound = DisagreementBound(self.confidence)

    @property
    def standing(self) -> Standing:
        """It has one repair, and allows it until that is proven bad."""
        return Standing(self.allowed, False, 0)

    def observe(self, disagreed: bool, *, rung: int = 0) -> None:
        """Count one checked request; may switch off."""
        with self._lock:
            self._bound.observe(disagreed)
            self._judge()

    @property
    def allowed(self) -> bool:
        """Whether non-prefix reuse may continue."""
        return self.reason is None

    @property
    def reason(self) -> str | None:
        """Why it is off and what to do; None while it is on."""
        with self._lock:
            return self._reason

    @property
    def bound(self) -> DisagreementBound:
        """A copy of the counts and bounds as they are now."""
        with self._lock:
            return replace(self._bound)

    def reset(self) -> None:
        """Switch on again and drop the counts: kept counts would switch it off at the next check."""
        with self._lock:
            self._bound = DisagreementBound(self.confidence)
            self._reason = None

    def _judge(self) -> None:
        """Switch off if the bound proves it. The caller holds the lock."""
        if self._reason is not None:
            return
        lower = self._bound.lower
        if lower > self.tolerated:
            self._reason = (
                f"reuse changed {self._bound.disagreements} of {self._bound.checked} checked answers: with "
                f"{self.confidence:.4g} confidence more than {lower:.4g} of all, where {self.tolerated:.4g} is "
                "tolerated; raise recompute_ratio or tolerate more, then call the engine's allow_non_prefix_reuse()"
            )


def _check_share(name: str, value: float, *, above_zero: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < 1
        or (above_zero and not value)
    ):
        raise ConfigError(f"{name} must be {'above 0' if above_zero else '0 or more'} and below 1, got {value!r}")
