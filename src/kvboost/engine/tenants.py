"""One engine for many tenants: a view of it for each, with names, a store and workspaces of its own.

Used by :class:`kvboost.KVBoost`. A view shares the model, what was found out about it, the memory's budget, connections
and threads with the engine it was made from. Invariants: no view's keys occur in another's; there is one view for each
tenant; the engine itself is closed last, as it holds what the views share.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.engine.life import EngineLife


class TenantViews:
    """The views of one engine that are open. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[str, EngineLife] = {}

    def __contains__(self, tenant: str) -> bool:
        with self._lock:
            return tenant in self._views

    def get(self, engine: EngineLife, tenant: str) -> EngineLife:
        """The view for this tenant; made if there is none."""
        if not isinstance(tenant, str):
            raise ConfigError(f"tenant={tenant!r} is no name; give a text")
        if engine._closed:
            raise ConfigError("this engine was closed; make a new one around the model")
        if tenant == engine.config.tenant:
            return engine
        with self._lock:
            if tenant not in self._views:
                self._views[tenant] = _view(engine, tenant)
            return self._views[tenant]

    def drop(self, view: EngineLife) -> None:
        """A view is being closed."""
        with self._lock:
            if self._views.get(view.config.tenant) is view:
                del self._views[view.config.tenant]

    def all(self) -> list[EngineLife]:
        """The views that are open."""
        with self._lock:
            return list(self._views.values())


def _view(engine: EngineLife, tenant: str) -> EngineLife:
    view = copy.copy(engine)
    view._viewed = engine
    view.config = replace(engine.config, tenant=tenant)
    if engine._parts is not None:
        view._parts = engine._parts.for_tenant(tenant)
        view._store = view._parts.store
    return view


def purge_tenant(engine: EngineLife, tenant: str) -> None:
    """Remove all of a tenant from every tier of the engine's own store."""
    parts = engine._parts
    if parts is None:
        return  # nothing was ever kept
    if parts.stores is None:
        raise ConfigError(
            "the store was given to this engine, which cannot tell tenants apart in it; remove them there"
        )
    was_open = tenant == engine.config.tenant or tenant in engine._tenants
    view = engine.for_tenant(tenant)
    view.clear()
    if not was_open:
        view.close()
    parts.stores.purge(tenant)
