"""What reading takes on this machine with this model, learnt from the requests themselves.

Used to decide whether moving chunks pays. Invariant: nothing is timed on purpose; a request's own stages
are observed once its first token exists, when even an asynchronous device has finished them.
"""

from __future__ import annotations

import threading

_FADE = 0.98  # of all earlier observations with each new one: the last fifty or so count
# Before anything was seen: a forward costs what this many further rows in it would. Sixteen pretended
# observations; their scale cancels out, as only costs of the same kind are compared.
_PRIOR_FIXED_ROWS = 32.0
_PRIOR_WEIGHT = 1e-6
_PRIOR_SHAPES = ((1, 16), (1, 128), (2, 256), (8, 1024))


class CostModel:
    """``seconds = fixed * forwards + per_row * rows``, by least squares over recent requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ff = self._fr = self._rr = self._ft = self._rt = 0.0
        self._place_seconds = self._placed_rows = 0.0
        for forwards, rows in _PRIOR_SHAPES:
            self._add(forwards, rows, _PRIOR_FIXED_ROWS * forwards + rows, weight=_PRIOR_WEIGHT)

    def observe_read(self, *, forwards: int, rows: int, seconds: float) -> None:
        """A prompt's missing rows were computed in so many forwards."""
        with self._lock:
            for name in ("_ff", "_fr", "_rr", "_ft", "_rt"):
                setattr(self, name, getattr(self, name) * _FADE)
            # A relative error counts the same in a short prompt as in a long one.
            self._add(forwards, rows, seconds, weight=1.0 / max(seconds, 1e-6) ** 2)

    def observe_move(self, *, rows: int, seconds: float) -> None:
        """Moved rows were placed."""
        with self._lock:
            self._place_seconds = self._place_seconds * _FADE + seconds
            self._placed_rows = self._placed_rows * _FADE + rows

    def read_seconds(self, *, forwards: float, rows: float) -> float:
        """What computing this would take."""
        with self._lock:
            fixed, per_row = self._solve()
            return fixed * forwards + per_row * rows

    def move_seconds(self, rows: int) -> float:
        """What placing so many moved rows would take."""
        with self._lock:
            return self._place_seconds / self._placed_rows * rows if self._placed_rows else 0.0

    def _add(self, forwards: float, rows: float, seconds: float, *, weight: float) -> None:
        self._ff += weight * forwards * forwards
        self._fr += weight * forwards * rows
        self._rr += weight * rows * rows
        self._ft += weight * forwards * seconds
        self._rt += weight * rows * seconds

    def _solve(self) -> tuple[float, float]:
        determinant = self._ff * self._rr - self._fr * self._fr
        if determinant <= 1e-12 * self._ff * self._rr:  # all requests had one shape: charge it to the rows
            return 0.0, self._rt / self._rr
        fixed = (self._ft * self._rr - self._rt * self._fr) / determinant
        per_row = (self._rt * self._ff - self._ft * self._fr) / determinant
        if fixed < 0.0:
            return 0.0, self._rt / self._rr
        if per_row < 0.0:
            return self._ft / self._ff, 0.0
        return fixed, per_row
