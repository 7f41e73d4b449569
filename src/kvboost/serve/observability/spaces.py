"""What this server's tenants and their models are called where KV is stored, as ``kvboost cache stat`` shows it.

Read by /v1/cache and by the request log. Names themselves are not in a store, only digests of them.
"""

from __future__ import annotations

import threading
import time

from kvboost.engine import KVBoost
from kvboost.types import tenant_digest

_TENANT_DIGITS, _MODEL_DIGITS = 8, 12  # as many as that command shows
_MODEL_S = 60.0  # a model that changes has its new id after so long


def stored_tenant(tenant: str) -> str:
    """The short id of a tenant; "-" for the one without a name."""
    return tenant_digest(tenant).hex()[:_TENANT_DIGITS] if tenant else "-"


class Spaces:
    """The tenants that an engine has served. Thread-safe."""

    def __init__(self, engine: KVBoost) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._models: dict[str, str] = {}  # by tenant, once in a while: each takes a look at all weights
        self._looked_at = 0.0

    def listed(self) -> list[dict[str, str]]:
        """Each tenant with its ids: its own, and the one its model has for it."""
        found = []
        with self._lock:
            if time.monotonic() - self._looked_at > _MODEL_S:
                self._models.clear()
                self._looked_at = time.monotonic()
            for view in self._engine.views():
                tenant, session = view.config.tenant, view.session
                if session is not None and tenant not in self._models:
                    self._models[tenant] = session.prefiller.keys.namespace().hex()[:_MODEL_DIGITS]
                found.append({"tenant": tenant, "id": stored_tenant(tenant), "model": self._models.get(tenant, "-")})
        return found
