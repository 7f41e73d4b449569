"""Holds what requests stored for as long as their clients asked: ``cache_control`` and ``prompt_cache_retention``.

Called by the service when an answer has ended, so that no token waits for it. Invariants: no request fails or waits
because its prompt cannot be held; that it could not be is counted; a tenant that was released holds nothing.
"""

from __future__ import annotations

import logging
from hashlib import sha256

from kvboost.core.keys import token_array
from kvboost.engine import KVBoost
from kvboost.errors import CapacityError, ConfigError
from kvboost.failures import log_failure
from kvboost.hf.adapters import AS_SET
from kvboost.serve.errors import ApiError
from kvboost.serve.generation.prompts import Hold
from kvboost.serve.generation.requests import GenerationRequest
from kvboost.serve.observability.metrics import Metrics
from kvboost.serve.security.fair_pool import FairPool

_MAX_WAITING = 256  # a slow tier must not make prompts pile up

_log = logging.getLogger("kvboost.serve")


class ClientPins:
    """Pins what clients asked for, in a thread of its own."""

    def __init__(self, engine: KVBoost, *, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._pool = FairPool(max_waiting=0, name="kvboost-pins")

    def start(self, request: GenerationRequest, *, adapter: str | None) -> None:
        """Begin to hold what this request asked for of its prompt. Returns at once."""
        for hold in request.holds:
            if self._pool.waiting >= _MAX_WAITING:
                self._failed(CapacityError("too many others wait to be held"))
                continue
            try:
                self._pool.start(request.caller.tenant, self._add, hold, request, adapter)
            except ApiError as error:  # no thread left; the answer is the client's all the same
                self._failed(error)

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.close()

    def _add(self, hold: Hold, request: GenerationRequest, adapter: str | None) -> None:
        tenant, ((ids, boundaries),) = request.caller.tenant, request.prompts
        views = {view.config.tenant: view for view in self._engine.views()}
        if (engine := views.get(tenant) if tenant else self._engine) is None:
            return  # its key was revoked, and its memory released
        digest = sha256(token_array(ids[: hold.tokens]).tobytes()).hexdigest()
        try:
            with engine.parts.running(adapter or AS_SET):  # keys are those of the model as it is now
                pin = engine.pins.add(
                    engine.session,
                    ids[: hold.tokens + 1],  # a hit ends before the last token of a prompt
                    boundaries=[boundary for boundary in boundaries if boundary <= hold.tokens],
                    # With the time in its name, none is held for less than was asked for before.
                    name=hold.name or f"{adapter or ''}:{hold.seconds:g}:{digest}",
                    seconds=hold.seconds,
                    client=True,
                )
        except Exception as error:  # noqa: BLE001 - counted and logged; the client has its answer
            self._failed(error)
        else:
            # A full store may have refused the rest, and a pin of so little saves nobody anything.
            self._metrics.held(2 * pin.tokens >= hold.tokens)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, ApiError | CapacityError | ConfigError):
            _log.info("what a client asked for is not held: %s", error)
        else:
            log_failure(_log, error, "what a client asked for could not be held")
        self._metrics.held(False)
