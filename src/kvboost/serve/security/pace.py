"""Lets the large requests of one tenant rest while other tenants use the server.

The interpreter runs one thread at a time, and so the model as well waits for whoever parses a large body, makes lists
of its tokens or compiles its schema. Used by the pools that do so. Invariant: while others are here, for each
second of a processor that a tenant's work took its next request waits ``rest`` seconds, up to a bound. A request that
was begun does not wait again, and a tenant that is alone never does.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic

_HERE_S = 2.0  # after its last request a tenant counts as here
_MAX_REST_S = 5.0  # however much was worked


@dataclass(eq=False)
class Visit:
    """A request that is under way."""

    tenant: str
    begun: bool = False
    """Whether any of its work was."""


_visit: ContextVar[Visit | None] = ContextVar("the request that is answered", default=None)


def visit_of(tenant: str) -> Visit | None:
    """The request that is being answered, if it is this tenant's: an admin's may be for another."""
    visit = _visit.get()
    return visit if visit is not None and visit.tenant == tenant else None


class Pace:
    """Thread-safe."""

    def __init__(self, rest: float) -> None:
        """For each second of work, ``rest`` seconds of rest."""
        self._rest = rest
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        """When a tenant's last request ended, where it was a moment ago."""
        self._begins: dict[str, float] = {}
        """When a tenant's next request may begin."""

    @contextmanager
    def here(self, tenant: str) -> Iterator[None]:
        """A request of this tenant is under way."""
        with self._lock:
            self._under_way[tenant] += 1
        token = _visit.set(Visit(tenant))
        try:
            yield
        finally:
            _visit.reset(token)
            now = monotonic()
            with self._lock:
                self._under_way[tenant] -= 1
                self._under_way += Counter()  # keeps those that have any
                self._last[tenant] = now
                self._last = {name: ended for name, ended in self._last.items() if now - ended < _HERE_S}
                self._begins = {name: begins for name, begins in self._begins.items() if begins > now}

    def is_under_way(self, tenant: str) -> bool:
        """Whether a request of this tenant is."""
        with self._lock:
            return tenant in self._under_way

    def worked(self, tenant: str, seconds: float) -> None:
        """Work of this tenant has just ended, and took so much of a processor."""
        if self._rest:
            now = monotonic()
            with self._lock:
                begins = max(self._begins.get(tenant, now), now) + self._rest * seconds
                self._begins[tenant] = min(begins, now + _MAX_REST_S)

    def wait(self, tenant: str) -> float:
        """Seconds until this tenant's next request may begin."""
        now = monotonic()
        with self._lock:
            others = self._under_way.keys() | {name for name, ended in self._last.items() if now - ended < _HERE_S}
            if not others - {tenant}:
                return 0.0
            return max(0.0, self._begins.get(tenant, now) - now)
