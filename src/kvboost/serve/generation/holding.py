"""Holds what requests stored for as long as their clients asked: ``cache_control`` and ``prompt_cache_retention``.

Called by the service when an answer has ended, so that no token waits for it. Invariants: no request fails or waits
because its prompt cannot be held; that it could not be is counted; a tenant without a key holds nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from kvboost.core.keys import token_array
from kvboost.engine import KVBoost
from kvboost.errors import CapacityError, ConfigError
from kvboost.failures import log_failure
from kvboost.serve.errors import ApiError
from kvboost.serve.observability.metrics import Metrics
from kvboost.serve.security.auth import Keys
from kvboost.serve.security.fair_pool import FairPool

_log = logging.getLogger("kvboost.serve")


@dataclass(frozen=True)
class Hold:
    """A beginning of a prompt that a client wants to find again."""

    tokens: int
    seconds: float
    name: str | None = None
    """The next one of this name replaces it. Without a name only one of the same tokens does."""


class ClientPins:
    """Pins what clients asked for, in a thread of its own."""

    def __init__(self, engine: KVBoost, *, keys: Keys, metrics: Metrics) -> None:
        self._engine, self._keys, self._metrics = engine, keys, metrics
        self._pool = FairPool(max_waiting=0, name="kvboost-pins")

    def start(
        self, holds: Sequence[Hold], ids: Sequence[int], boundaries: Sequence[int], *, tenant: str, adapter: str | None
    ) -> None:
        """Begin to hold these beginnings of a prompt. Returns at once."""
        for hold in holds:
            try:
                self._pool.start(tenant, self._add, hold, ids, boundaries, tenant=tenant, adapter=adapter)
            except ApiError as error:  # no thread left; the answer is the client's all the same
                self._failed(error)

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.close()

    def _add(
        self, hold: Hold, ids: Sequence[int], boundaries: Sequence[int], *, tenant: str, adapter: str | None
    ) -> None:
        if self._keys and tenant not in {caller.tenant for caller in self._keys.callers}:
            return  # its key was revoked, and its memory may have been released by now
        # With the time in its name, none is held for less than was asked for before.
        name = (
            hold.name
            or f"{adapter or ''}:{hold.seconds:g}:{sha256(token_array(ids[: hold.tokens]).tobytes()).hexdigest()}"
        )
        try:
            engine = self._engine.for_tenant(tenant) if tenant else self._engine
            with engine.parts.running(adapter):  # keys are those of the model as it is now
                engine.pins.add(
                    engine.session,
                    ids[: hold.tokens + 1],  # a hit ends before the last token of a prompt
                    boundaries=[boundary for boundary in boundaries if boundary <= hold.tokens],
                    name=name,
                    seconds=hold.seconds,
                    client=True,
                )
        except (CapacityError, ConfigError) as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 - counted and logged; the client has its answer
            log_failure(_log, error, "what a client asked for could not be held")
            self._metrics.held(False)
        else:
            self._metrics.held(True)

    def _failed(self, error: Exception) -> None:
        _log.info("what a client asked for is not held: %s", error)
        self._metrics.held(False)
