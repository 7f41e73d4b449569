"""The views of one engine: one for each tenant, made when it is first asked for.

Used by :class:`kvboost.KVBoost`. Invariants: no view's keys occur in another's; there is one view for each tenant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvboost.errors import ConfigError

View = TypeVar("View")


class TenantViews(Generic[View]):
    """The views that are open. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[str, View] = {}

    def __contains__(self, tenant: str) -> bool:
        with self._lock:
            return tenant in self._views

    def get(self, tenant: str, *, make: Callable[[str], View]) -> View:
        """The view for this tenant, made if there is none."""
        if not isinstance(tenant, str):
            raise ConfigError(f"tenant={tenant!r} is no name; give a text")
        with self._lock:
            if tenant not in self._views:
                self._views[tenant] = make(tenant)
            return self._views[tenant]

    def drop(self, tenant: str) -> None:
        """A view is being closed."""
        with self._lock:
            self._views.pop(tenant, None)

    def all(self) -> list[View]:
        """The views that are open."""
        with self._lock:
            return list(self._views.values())
