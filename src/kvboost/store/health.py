"""The health of a tier: failures counted by kind, the first of each kind a warning.

Used by tiers, for which a failing disk or server is a miss and never an error.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter


class Health:
    """Counts failures. Thread-safe."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def failed(self, kind: str, cause: object, *, remedy: str) -> None:
        """Count one more failure of ``kind``; ``remedy`` says what the user can do about it."""
        with self._lock:
            self._counts[kind] += 1
            first = self._counts[kind] == 1
        if first:
            warnings.warn(
                f"{self._tier} tier: {kind}: {cause}; {remedy}. The cache goes on; more of these are only counted.",
                RuntimeWarning,
                stacklevel=3,
            )

    def counts(self) -> dict[str, int]:
        """How often each kind of failure was seen."""
        with self._lock:
            return dict(self._counts)
