"""Non-prefix reuse that must prove itself first: exact answers until checks have bounded the share that would change.

Used instead of :class:`kvboost.approx.guard.ReuseGuard` with ``quality="auto"``. Repairs are tried one after another,
cheapest first, on requests that are answered exactly. Invariant: no repair is used before its upper bound was below the
tolerated share, and none any longer once its lower bound is above it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from kvboost.approx.guard import DisagreementBound

_MAX_CHECKS = 400  # a repair whose share lies next to the tolerated one would be tried forever
_WATCHED = 200  # checks of a repair in use that are judged together: a long good past must not hide a bad present


class EarnedTrust:
    """Tries repairs in order and allows the first that is proven good enough. Thread-safe.

    With probability ``confidence``, no repair is ever allowed whose share of changed answers, if it stays the same
    from check to check, is above ``tolerated``: each of the repairs gets its part of the error.
    """

    def __init__(self, tolerated: float, *, repairs: Sequence[str], confidence: float = 0.95) -> None:
        """``repairs`` are their names, in the order they are tried."""
        self._tolerated, self._names = tolerated, tuple(repairs)
        self._confidence = 1.0 - (1.0 - confidence) / len(self._names)
        self._lock = threading.Lock()
        self._rung, self._earned = 0, False
        self._bound = DisagreementBound(self._confidence)

    @property
    def rung(self) -> int:
        """The repair that is tried or in use; the last one after all have failed."""
        with self._lock:
            return min(self._rung, len(self._names) - 1)

    @property
    def allowed(self) -> bool:
        """Whether non-prefix reuse has earned its place."""
        with self._lock:
            return self._earned

    @property
    def on_trial(self) -> bool:
        """Whether requests are answered exactly and checked, to find out."""
        with self._lock:
            return not self._earned and self._rung < len(self._names)

    @property
    def bound(self) -> DisagreementBound:
        """A copy of the counts and bounds of the repair that is tried or in use."""
        with self._lock:
            return replace(self._bound)

    def observe(self, disagreed: bool) -> None:
        """Count one checked request; may allow, end or change the repair."""
        with self._lock:
            if self._rung == len(self._names):
                return  # a check that began before the last repair was given up
            bound = self._bound
            bound.observe(disagreed)
            proven, share = bound.excludes(self._tolerated), bound.disagreements / bound.checked
            if proven and share > self._tolerated:
                self._try_next()
            elif self._earned:
                if bound.checked >= _WATCHED:
                    self._bound = DisagreementBound(self._confidence)
            elif proven:
                self._earned, self._bound = True, DisagreementBound(self._confidence)
            elif bound.checked >= _MAX_CHECKS:
                self._try_next()

    def _try_next(self) -> None:
        self._rung, self._earned = self._rung + 1, False
        self._bound = DisagreementBound(self._confidence)

    def reset(self) -> None:
        """Start again with the first repair."""
        with self._lock:
            self._rung = -1
            self._try_next()

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
        """Checks that would be enough if no other answer differed."""
        low, high = self._bound.checked, _MAX_CHECKS
        while low < high:
            middle = (low + high) // 2
            bound = DisagreementBound(self._confidence, checked=middle, disagreements=self._bound.disagreements)
            low, high = (low, middle) if bound.upper < self._tolerated else (middle + 1, high)
        return high
