"""What reading and repairing take on this machine with this model, learnt from the requests themselves.

Used to decide whether moving chunks pays. Invariant: nothing is timed on purpose; a request's own stages
are observed once its first token exists, when even an asynchronous device has finished them.
"""

from __future__ import annotations

import threading

_FADE = 0.98  # of all earlier observations with each new one: the last fifty or so count
_USUAL_FIXED_ROWS = 32.0  # a forward costs what this many further rows in it would, until requests say otherwise
_FIXED_ROWS = (4.0, 256.0)  # nor is an answer outside believed: chunks of one size cannot tell forwards from rows
_USUAL_REPAIR = 1.25  # of what the rows of a repair would take in plain steps: scattered, masked, spread
_REPAIR = (0.25, 16.0)


class CostModel:
    """``seconds = per_row * (rows + fixed_rows * forwards)``, over recent requests; and how repairs compare to that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ff = self._fr = self._rr = self._ft = self._rt = 0.0
        self._place_seconds = self._placed_rows = 0.0
        self._repair = _USUAL_REPAIR

    def observe_read(self, *, forwards: int, rows: int, seconds: float) -> None:
        """A prompt's missing rows were computed in so many forwards."""
        with self._lock:
            weight = (
                1.0 / max(seconds, 1e-6) ** 2
            )  # a relative error counts the same in a short prompt as in a long one
            self._ff = _FADE * self._ff + weight * forwards * forwards
            self._fr = _FADE * self._fr + weight * forwards * rows
            self._rr = _FADE * self._rr + weight * rows * rows
            self._ft = _FADE * self._ft + weight * forwards * seconds
            self._rt = _FADE * self._rt + weight * rows * seconds

    def observe_move(self, *, rows: int, seconds: float) -> None:
        """Moved rows were placed."""
        with self._lock:
            self._place_seconds = self._place_seconds * _FADE + seconds
            self._placed_rows = self._placed_rows * _FADE + rows

    def observe_repair(self, *, expected: float, seconds: float) -> None:
        """A repair whose rows were expected to take so long took ``seconds``."""
        with self._lock:
            times = min(max(seconds / max(expected, 1e-9), _REPAIR[0]), _REPAIR[1])
            self._repair += 0.2 * (times - self._repair)

    def repair_refused(self) -> None:
        """A repair was too dear. It may have been bad luck: with time it is tried again."""
        with self._lock:
            self._repair += 0.005 * (_USUAL_REPAIR - self._repair)

    def read_seconds(self, *, forwards: float, rows: float) -> float:
        """What computing this would take; in units of a row before anything was seen."""
        with self._lock:
            fixed_rows, per_row = self._solve()
            return per_row * (rows + fixed_rows * forwards)

    def move_seconds(self, rows: int) -> float:
        """What placing so many moved rows would take."""
        with self._lock:
            return self._place_seconds / self._placed_rows * rows if self._placed_rows else 0.0

    @property
    def in_seconds(self) -> bool:
        """Whether a reading was seen, so that what is told here is in seconds."""
        return self._rr > 0.0

    @property
    def repair_factor(self) -> float:
        """What repairs take, against plain steps with as many rows."""
        with self._lock:
            return self._repair

    def _solve(self) -> tuple[float, float]:
        """How many rows a forward costs, and seconds per row."""
        if not self._rr:
            return _USUAL_FIXED_ROWS, 1.0
        fixed_rows = _USUAL_FIXED_ROWS
        determinant = self._ff * self._rr - self._fr * self._fr
        if determinant > 1e-3 * self._ff * self._rr:  # else all requests had nearly one shape
            fixed = self._ft * self._rr - self._rt * self._fr
            per_row = self._rt * self._ff - self._ft * self._fr
            lowest, highest = _FIXED_ROWS
            fixed_rows = highest if per_row <= 0.0 else min(max(fixed / per_row, lowest), highest)
        # With that given, the seconds per row that fit best.
        squares = self._rr + 2.0 * fixed_rows * self._fr + fixed_rows**2 * self._ff
        return fixed_rows, (self._rt + fixed_rows * self._ft) / squares
