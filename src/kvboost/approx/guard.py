"""How often non-prefix reuse changes an answer: an always-valid bound, and a switch that acts on it.

Called by the engine, which answers a sample of requests both ways and reports whether the first tokens differed. A
guard allows reuse until that is proven worse than tolerated, or with ``quality="auto"`` not before it is proven good
enough. Invariant: the bound may be read after every check. The probability that it is ever wrong, over all reads, is at
most ``1 - confidence``. A fixed-sample interval breaks that promise once it is read repeatedly and acted upon.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from kvboost.approx.trust import TrustFile, TrustState

if TYPE_CHECKING:
    from kvboost.core.spans import CheckSlot

CONFIDENCE = 0.95
_HALVINGS = 64  # from [0, 1] down to 5e-20, below what a double next to a share of 1e-3 can tell apart
_MAX_CHECKS = 400  # a repair whose share lies next to the tolerated one would be tried forever
_RECENT = 200  # checks of a repair in use that are also judged by themselves: a good past must not hide a bad present


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
    checked: int = 0
    disagreements: int = 0

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
        likelihood = self.disagreements * math.log(share) + agreements * math.log1p(-share)
        # B(s + 1/2, f + 1/2) / B(1/2, 1/2): the averaged likelihood. B(1/2, 1/2) is pi.
        averaged = (
            math.lgamma(self.disagreements + 0.5)
            + math.lgamma(agreements + 0.5)
            - math.lgamma(self.checked + 1.0)
            - math.log(math.pi)
        )
        return likelihood <= averaged + math.log(1.0 - self.confidence)

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


class ReuseGuard:
    """Says whether non-prefix reuse is allowed, and with which repair. Thread-safe. It works in one of two ways.

    With ``earn``, nothing is allowed at first: repairs are tried in order, cheapest first, on requests that are
    answered exactly. With probability ``CONFIDENCE``, none is ever allowed whose share of changed answers, if it stays
    the same from check to check, is above ``tolerated``: each of the repairs gets its part of the error. What checks
    have shown may be kept for the next process (:class:`TrustFile`): the bounds are valid over its checks and these
    together. Checks go on while a repair is in use; one that is proven bad is given up, and the next is tried.

    Without it, one repair is allowed from the beginning, until it is proven bad. While its share is the same from check
    to check and at most ``tolerated``, it is ever switched off with probability at most ``1 - CONFIDENCE``, however
    long it runs. If the share is above, it is switched off sooner or later: the sooner, the larger the excess.

    Not guaranteed: anything about a single request, since the share is an average; that the share of a repair allowed
    from the beginning is below ``tolerated``, since lack of proof is no proof (read ``bound.upper`` for that). Each
    ``reset`` starts a new guarantee. There is no minimum number of checks: with a tolerated share below 2.5 %, one
    disagreement in the very first check is proof enough.
    """

    def __init__(
        self, tolerated: float, *, repairs: Sequence[str] = (), earn: bool = False, keeper: TrustFile | None = None
    ) -> None:
        """``repairs`` are their names, in the order they are tried; ``earn`` if none is allowed yet."""
        self._tolerated, self._names, self._earn = tolerated, tuple(repairs) or ("the repair",), earn
        self._confidence = 1.0 - (1.0 - CONFIDENCE) / len(self._names)
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        """Held, before the other one, by who changes the state: states are kept in the order in which they came."""
        self.has_slot: Callable[[], bool] = lambda: False
        """Whether another request could be checked; set by who checks. If not, none is put on trial."""
        self.chooses: Callable[[], bool] = lambda: False
        """Whether a request that begins is one of those to check; set by who checks."""
        self.reserve: Callable[[], CheckSlot | None] = lambda: None
        """A slot for a request that is to be checked; None if all are reserved. Set by who checks."""
        self._keeper = keeper
        self._bound = self._recent = DisagreementBound(self._confidence)
        self._resume((keeper.load() if keeper is not None else None) or TrustState(allowed=not earn))

    @property
    def standing(self) -> Standing:
        """Whether reuse is allowed or on trial, and with which repair; the last one after all have failed."""
        with self._lock:
            trying = not self._allowed and self._rung < len(self._names)
            return Standing(self._allowed, trying, min(self._rung, len(self._names) - 1))

    @property
    def allowed(self) -> bool:
        """Whether non-prefix reuse is used."""
        return self.standing.allowed

    @property
    def bound(self) -> DisagreementBound:
        """A copy of the counts and bounds of the repair that is tried or in use, or was the last one."""
        with self._lock:
            return replace(self._bound)

    def observe(self, disagreed: bool, *, rung: int = 0) -> None:
        """Count one request checked with the repair ``rung``; may allow, end or change the repair."""
        with self._saving:
            state = self._count(disagreed, rung)
            if state is not None:
                self._keep(state)

    def _count(self, disagreed: bool, rung: int) -> TrustState | None:
        """The state after this check; None if it does not count."""
        with self._lock:
            if self._rung != rung:
                return None  # the check began before its repair was given up
            self._bound.observe(disagreed)
            watched = self._allowed and self._earn
            if watched:
                self._recent.observe(disagreed)
            if self._is_worse(self._bound) or (watched and self._is_worse(self._recent)):
                self._give_up()
            elif self._allowed:
                if self._recent.checked >= _RECENT:
                    self._recent = DisagreementBound(self._confidence)
            elif self._bound.excludes(self._tolerated):
                self._resume(TrustState(rung, allowed=True))
            elif self._bound.checked >= _MAX_CHECKS:
                self._give_up()
            return self._state()

    def _is_worse(self, bound: DisagreementBound) -> bool:
        above = bound.disagreements > self._tolerated * bound.checked
        return above and (self._tolerated == 0.0 or bound.excludes(self._tolerated))

    def _resume(self, state: TrustState) -> None:
        self._rung = min(state.rung, len(self._names))
        self._allowed = state.allowed and self._rung < len(self._names)
        self._bound = DisagreementBound(self._confidence, state.checked, state.differed)
        self._recent = DisagreementBound(self._confidence, state.recent_checked, state.recent_differed)

    def _give_up(self) -> None:
        """Try the next repair; the counts of the last one stay."""
        self._rung, self._allowed = self._rung + 1, False
        if self._rung < len(self._names):
            self._resume(TrustState(self._rung))

    def _state(self) -> TrustState:
        bound, recent = self._bound, self._recent
        counts = bound.checked, bound.disagreements, recent.checked, recent.disagreements
        return TrustState(self._rung, self._allowed, *counts)

    def _keep(self, state: TrustState, *, anew: bool = False) -> None:
        """Not in the lock that requests wait for."""
        if self._keeper is not None:
            self._keeper.save(state, anew=anew)

    def reset(self) -> None:
        """Start again with the first repair: what was shown is lost, also for the next process."""
        with self._saving:
            with self._lock:
                self._resume(TrustState(allowed=not self._earn))
                state = self._state()
            self._keep(state, anew=True)

    @property
    def reason(self) -> str | None:
        """Why it is off, where a trial stands, and what to do; None while reuse is allowed."""
        with self._lock:
            if self._allowed:
                return None
            bound = self._bound
            if not self._earn:
                return (
                    f"reuse changed {bound.disagreements} of {bound.checked} checked answers: with "
                    f"{self._confidence:.4g} confidence more than {bound.lower:.4g} of all, where "
                    f"{self._tolerated:.4g} is tolerated; raise recompute_ratio or tolerate more, then call the "
                    "engine's allow_non_prefix_reuse()"
                )
            if self._rung == len(self._names):
                return (
                    f"exact only: {' and '.join(self._names)} changed more than {self._tolerated:.3g} of the checked "
                    "answers, or could not be told apart from it; tolerate more with a number as quality, or try again "
                    "with allow_non_prefix_reuse()"
                )
            return (
                f"exact only: {bound.checked} of about {self._needed()} checks of {self._names[self._rung]!r} done, "
                f"{bound.disagreements} differed"
            )

    def _needed(self) -> int:
        """Checks that would be enough if no other answer differed; at most those that are made."""
        low, high = self._bound.checked, _MAX_CHECKS
        while low < high:
            middle = (low + high) // 2
            bound = replace(self._bound, checked=middle)
            good = bound.excludes(self._tolerated) and not self._is_worse(bound)
            low, high = (low, middle) if good else (middle + 1, high)
        return high
