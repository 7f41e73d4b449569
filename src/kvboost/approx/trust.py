"""Non-prefix reuse that must prove itself first: exact answers until checks have bounded the share that would change.

Used instead of :class:`kvboost.approx.guard.ReuseGuard` with ``quality="auto"``. Repairs are tried one after another,
cheapest first, on requests that are answered exactly. Invariant: no repair is chosen for a request before its upper
bound was below the tolerated share, and none any longer once its lower bound is above it. What checks have shown may be
kept for the next process (:mod:`kvboost.approx.trust_file`): the bounds are valid over its checks and these together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvboost.approx.guard import DisagreementBound, Standing
from kvboost.approx.places import TakenPlace

_MAX_CHECKS = 400  # a repair whose share lies next to the tolerated one would be tried forever
_RECENT = 200  # checks of a repair in use that are also judged by themselves: a good past must not hide a bad present


@dataclass(frozen=True)
class TrustState:
    """How far the trial is."""

    rung: int = 0
    earned: bool = False
    checked: int = 0
    differed: int = 0
    recent_checked: int = 0
    """Of the latest checks of a repair in use, which are also judged by themselves."""
    recent_differed: int = 0


class TrustKeeper(Protocol):
    """Keeps a state for the next process."""

    def load(self) -> TrustState | None:
        """What was kept last for the model as it is now; None if nothing was, or it is of no use."""

    def save(self, state: TrustState, *, anew: bool = False) -> None:
        """Keep this, if that can be done; raises nothing. ``anew``: also if a later repair was tried already."""


class EarnedTrust:
    """Tries repairs in order and allows the first that is proven good enough. Thread-safe.

    With probability ``confidence``, no repair is ever allowed whose share of changed answers, if it stays the same
    from check to check, is above ``tolerated``: each of the repairs gets its part of the error.
    """

    def __init__(
        self, tolerated: float, *, repairs: Sequence[str], confidence: float = 0.95, keeper: TrustKeeper | None = None
    ) -> None:
        """``repairs`` are their names, in the order they are tried."""
        self._tolerated, self._names = tolerated, tuple(repairs)
        self._confidence = 1.0 - (1.0 - confidence) / len(self._names)
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        """Held, before the other one, by who changes the state: states are kept in the order in which they came."""
        self.has_place: Callable[[], bool] = lambda: False
        """Whether another request could be checked; set by who checks. If not, none is put on trial."""
        self.reserve: Callable[[], TakenPlace | None] = lambda: None
        """A place for a request that begins, if it is one of those to check; set by who checks."""
        self._keeper = keeper
        self._bound = self._recent = DisagreementBound(self._confidence)
        self._resume((keeper.load() if keeper is not None else None) or TrustState())

    @property
    def standing(self) -> Standing:
        """Whether reuse is earned or on trial, and with which repair; the last one after all have failed."""
        with self._lock:
            trying = not self._earned and self._rung < len(self._names)
            return Standing(self._earned, trying, min(self._rung, len(self._names) - 1))

    @property
    def allowed(self) -> bool:
        """Whether non-prefix reuse has earned its place."""
        return self.standing.allowed

    @property
    def bound(self) -> DisagreementBound:
        """A copy of the counts and bounds of the repair that is tried or in use."""
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
            if self._earned:
                self._recent.observe(disagreed)
            if self._is_worse(self._bound) or (self._earned and self._is_worse(self._recent)):
                self._start(rung + 1)
            elif self._earned:
                if self._recent.checked >= _RECENT:
                    self._recent = DisagreementBound(self._confidence)
            elif self._bound.excludes(self._tolerated):
                self._start(rung, earned=True)
            elif self._bound.checked >= _MAX_CHECKS:
                self._start(rung + 1)
            return self._state()

    def _is_worse(self, bound: DisagreementBound) -> bool:
        return bound.disagreements > self._tolerated * bound.checked and bound.excludes(self._tolerated)

    def _start(self, rung: int, *, earned: bool = False) -> None:
        self._resume(TrustState(rung, earned))

    def _resume(self, state: TrustState) -> None:
        self._rung = min(state.rung, len(self._names))
        self._earned = state.earned and self._rung < len(self._names)
        self._bound = DisagreementBound(self._confidence, checked=state.checked, disagreements=state.differed)
        self._recent = DisagreementBound(
            self._confidence, checked=state.recent_checked, disagreements=state.recent_differed
        )

    def _state(self) -> TrustState:
        bound, recent = self._bound, self._recent
        counts = bound.checked, bound.disagreements, recent.checked, recent.disagreements
        return TrustState(self._rung, self._earned, *counts)

    def _keep(self, state: TrustState, *, anew: bool = False) -> None:
        """Not in the lock that requests wait for."""
        if self._keeper is not None:
            self._keeper.save(state, anew=anew)

    def reset(self) -> None:
        """Start again with the first repair: what was earned is lost, also for the next process."""
        with self._saving:
            with self._lock:
                self._start(0)
                state = self._state()
            self._keep(state, anew=True)

    @property
    def reason(self) -> str | None:
        """Where the trial stands; None once it is passed."""
        with self._lock:
            if self._earned:
                return None
            if self._rung == len(self._names):
                return (
                    f"exact only: {' and '.join(self._names)} changed more than {self._tolerated:.3g} of the checked "
                    "answers, or could not be told apart from it; tolerate more with a number as quality, or try again "
                    "with allow_non_prefix_reuse()"
                )
            bound = self._bound
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
