"""Places for the requests that are checked: one is taken when a request begins, and is free once its check is over.

Used by :class:`kvboost.approx.shadow.ShadowChecks`. A place taken at the end of a request would go to the shortest
answers first, and the requests before that would hold their blocks without a limit. Thread-safe.
"""

from __future__ import annotations

import threading


class CheckPlaces:
    """So many requests may be on trial, wait for a check, or be checked at a time."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._free = count

    @property
    def any_free(self) -> bool:
        """Whether one could be taken now."""
        return self._free > 0

    def take(self) -> TakenPlace | None:
        """A place, or None if all are taken."""
        with self._lock:
            if self._free == 0:
                return None
            self._free -= 1
            return TakenPlace(self)

    def _give_back(self, place: TakenPlace) -> None:
        with self._lock:
            self._free += place.held
            place.held = False


class TakenPlace:
    """One of the places."""

    def __init__(self, places: CheckPlaces) -> None:
        self._places = places
        self.held = True

    def release(self) -> None:
        """Leave it to another request. Harmless the second time."""
        self._places._give_back(self)
