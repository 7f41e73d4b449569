"""One id and one log line for every request, and what an OpenTelemetry span of it is told: numbers, never text.

:class:`RequestLog` is the outermost layer; :class:`kvboost.serve.generation.service.Service` adds what was computed
and reused, to the span too that OpenTelemetry's own instrumentation has opened. Tenants are named as stores do.
Invariants: every response names the request's id; of what a client sends only the id is logged, and only if it is
short and made of plain characters; a request that fails is answered with a 500, if it can be; who has no key cannot
fill a disk with lines, nor keep out those about callers who have one; what is added to a span has no text, key or
tenant. Without a provider in the process nothing is imported, and a request costs one look-up.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.engine import KVBoost
from kvboost.failures import log_failure
from kvboost.serve.errors import ApiError
from kvboost.serve.observability.metrics import Metrics, RequestRecord
from kvboost.types import tenant_digest

if TYPE_CHECKING:
    from opentelemetry.trace import Span

REQUEST_ID = "x-request-id"
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))
_PROBES = ("/health", "/ready", "/metrics")
_CLIENT_GONE = 499  # no response was begun, as its reader had gone
_MAX_UNKNOWN = 60  # lines about requests of nobody known
_MINUTE_S = 60.0
_TENANT_DIGITS, _MODEL_DIGITS = 8, 12  # as many as ``kvboost cache stat`` shows
_MODEL_S = 60.0  # a model that changes has its new id after so long
_OPERATIONS = {"chat": "chat", "completions": "text_completion", "responses": "chat", "messages": "chat"}

_log = logging.getLogger("kvboost.serve")


class CutOffError(Exception):
    """A response that was begun and failed; the log says how."""


@dataclass
class RequestNote:
    """What is known of a request that runs."""

    id: str
    record: RequestRecord | None = None
    """Of the generation it asked for, once that has ended."""


_current: ContextVar[RequestNote | None] = ContextVar("the request that runs", default=None)


def current_request() -> RequestNote | None:
    """The request that this runs for; None outside of any."""
    return _current.get()


def stored_tenant(tenant: str) -> str:
    """What a tenant is called where KV is stored, in short: a store has digests of names only. "-" for no name."""
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


class RequestLog:
    """Gives requests an id, writes a line about each and counts the responses, refused ones too."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._unknown = 0  # requests of nobody known in this minute
        self._minute_ends = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and log how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = RequestNote(_id_of(scope))
        _current.set(note)
        scope.setdefault("state", {})
        began, status = time.monotonic(), _CLIENT_GONE
        started = False

        async def named(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                MutableHeaders(scope=message)[REQUEST_ID] = note.id
                self._metrics.responded(status)
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:  # noqa: BLE001 - logged, and answered with a 500 or by cutting the connection
            log_failure(_log, error, "request=%s failed", note.id)
            if started:
                # The server logs this and cuts the connection: the client must not take it for a whole answer.
                raise CutOffError(f"request={note.id} was cut off") from None
            failure = ApiError(500, "the server failed; its log says why")
            await JSONResponse(failure.body(scope["path"]), failure.status)(scope, receive, named)
        finally:
            if self._may_write(scope, now := time.monotonic()):
                _write(scope, note, status=status, seconds=now - began)

    def _may_write(self, scope: Scope, now: float) -> bool:
        """Any request, a probe as well, ends a minute that is over."""
        if now >= self._minute_ends:
            if self._unknown > _MAX_UNKNOWN:
                left_out = self._unknown - _MAX_UNKNOWN
                _log.info(
                    "%d requests without a valid key are left out here (%d a minute are not)", left_out, _MAX_UNKNOWN
                )
            self._unknown, self._minute_ends = 0, now + _MINUTE_S
        if scope["state"].get("caller") is not None or _level(scope) < logging.INFO:
            return True
        self._unknown += 1
        return self._unknown <= _MAX_UNKNOWN


def _id_of(scope: Scope) -> str:
    """The client's id for the request, if it is fit to be written down; else a new one."""
    given = [value for name, value in scope["headers"] if name == REQUEST_ID.encode()]
    if len(given) == 1 and _GIVEN_ID.fullmatch(given[0]):
        return str(given[0].decode("ascii"))
    return f"req-{secrets.token_hex(12)}"


def _write(scope: Scope, note: RequestNote, *, status: int, seconds: float) -> None:
    state, record = scope["state"], note.record
    caller, route = state.get("caller"), state.get("route")
    method = scope["method"] if scope["method"] in _METHODS else "-"
    words = [
        f"{method} {route or '-'} status={status} request={note.id}",
        f"tenant={stored_tenant(caller.tenant) if caller is not None else '-'}",
        f"ms={seconds * 1000:.1f}",
    ]
    if record is not None:
        words.append(
            f"answer={record.id} prompt={record.prompt} exact={record.exact} moved={record.moved} "
            f"recomputed={record.recomputed} new={record.new} ttft_ms={record.ttft_ms} finish={record.finish}"
        )
    _log.log(_level(scope), "%s", " ".join(words))


def _level(scope: Scope) -> int:
    return logging.DEBUG if scope["state"].get("route") in _PROBES else logging.INFO


def is_enabled() -> bool:
    """Whether the process has set a provider: then it has imported OpenTelemetry, so that this need not."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return False
    return not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider | api.NoOpTracerProvider)


def describe_span(
    span: Span, record: RequestRecord, *, model: str, bitwise: bool, timings_ms: Mapping[str, float]
) -> None:
    """Set the attributes; ``timings_ms`` are the stages of its first prompt's prefill."""
    known: dict[str, Any] = {}
    if record.ttft_ms is not None:
        known = {"kvboost.ttft_ms": record.ttft_ms, "kvboost.waiting_ms": timings_ms.get("waiting", 0.0)}
    if record.endpoint in _OPERATIONS:  # OpenTelemetry has no name for warming a cache
        known["gen_ai.operation.name"] = _OPERATIONS[record.endpoint]
    span.set_attributes(
        {
            "gen_ai.request.model": model,
            "gen_ai.response.id": record.id,
            "gen_ai.response.finish_reasons": [record.finish],
            "gen_ai.usage.input_tokens": record.prompt,
            "gen_ai.usage.output_tokens": record.new,
            "kvboost.exact_tokens": record.exact,
            "kvboost.moved_tokens": record.moved,
            "kvboost.recomputed_tokens": record.recomputed,
            "kvboost.fresh_tokens": record.fresh,
            "kvboost.bitwise": bitwise,
            **known,
        }
    )


def current_span() -> Span | None:
    """The span this request runs in, as it is handed to the runner; None without tracing."""
    if not is_enabled():
        return None
    from opentelemetry import trace

    span = trace.get_current_span()
    return span if span.is_recording() else None
