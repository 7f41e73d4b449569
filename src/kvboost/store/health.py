"""What goes wrong in a tier: counted by kind, and said once.

Used by tiers, for which a failing disk or server is a miss and never an error.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter


class Troubles:
    """Counts troubles; the first of each kind is a warning. Thread-safe."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def met(self, kind: str, cause: object, *, remedy: str) -> None:
        """Count one more trouble of ``kind``; ``remedy`` says what the user can do about it."""
        with self._lock:
            self._counts[kind] += 1
            first = self._counts[kind] == 1
        if first:
            warnings.warn(
                f"{self._tier} tier: {kind}: {cause}; {remedy}. The cache goes on without it and counts the next ones.",
                RuntimeWarning,
                stacklevel=3,
            )

    def counts(self) -> dict[str, int]:
        """How often each kind was met."""
        with self._lock:
            return dict(self._counts)
