"""OpenTelemetry spans: one for each request that a key let in, with what it computed and reused, never its text.

Runs between the gate and the routes; :class:`kvboost.serve.generation.service.Service` fills the spans
in. The process sets the provider and the exporter (``kvboost[otel]``, docs/serving.md). Invariants: as long as it has
set none, nothing is imported and a request costs one look-up; no text, key or tenant of a client's is written, and
no attribute but the trace's own id comes from one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.serve.observability.metrics import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_OPERATIONS = {"chat": "chat", "completions": "text_completion", "responses": "chat", "messages": "chat"}
_SERVER_FAILED = 500


class Tracing:
    """Opens a span for each POST to a listed path and ends it with the response. Runs after the gate."""

    def __init__(self, app: ASGIApp, *, paths: Collection[str]) -> None:
        self._app, self._paths = app, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, in a span if tracing is enabled."""
        wanted = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths
        if not wanted or not is_enabled():
            await self._app(scope, receive, send)
            return
        from opentelemetry import trace

        span = _opened(scope)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= _SERVER_FAILED:
                    span.set_status(trace.StatusCode.ERROR)
            await send(message)

        # An exception's message may hold a client's text; only its type is recorded.
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                await self._app(scope, receive, watched)
            except BaseException as error:
                span.set_attribute("error.type", type(error).__qualname__)
                span.set_status(trace.StatusCode.ERROR)
                raise


def is_enabled() -> bool:
    """Whether the process has set a provider: then it has imported OpenTelemetry, so that this need not."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return False
    return not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider | api.NoOpTracerProvider)


def _opened(scope: Scope) -> Span:
    """A span of the trace the client is in, or of the one that an instrumented server has opened around us."""
    from opentelemetry import propagate, trace

    context, kind = None, trace.SpanKind.INTERNAL
    if not trace.get_current_span().get_span_context().is_valid:
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        context, kind = propagate.extract(carrier), trace.SpanKind.SERVER
    return trace.get_tracer("kvboost").start_span(
        f"POST {scope['path']}",
        context=context,
        kind=kind,
        attributes={"http.request.method": "POST", "http.route": scope["path"]},
    )


@dataclass(frozen=True)
class RequestSpan:
    """The span of one generation, and when it was handed to the runner."""

    span: Span
    submitted_ns: int

    def describe(self, record: RequestRecord, *, model: str, bitwise: bool, timings_ms: Mapping[str, float]) -> None:
        """Set the attributes; ``timings_ms`` are the stages of its first prompt's prefill."""
        known: dict[str, Any] = {"kvboost.ttft_ms": record.ttft_ms} if record.ttft_ms is not None else {}
        if record.endpoint in _OPERATIONS:  # OpenTelemetry has no name for warming a cache
            known["gen_ai.operation.name"] = _OPERATIONS[record.endpoint]
        self.span.set_attributes(
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
        if record.ttft_ms is not None:
            self._add_stages(record.ttft_ms, waited_ms=min(timings_ms.get("waiting", 0.0), record.ttft_ms))

    def _add_stages(self, ttft_ms: float, *, waited_ms: float) -> None:
        """The three stages as spans of their own, one after the other; all waiting counts as before the prefill."""
        from opentelemetry import trace

        read_from = self.submitted_ns + int(waited_ms * 1e6)
        first_token = self.submitted_ns + int(ttft_ms * 1e6)
        ended = max(time.time_ns(), first_token)
        context, tracer = trace.set_span_in_context(self.span), trace.get_tracer("kvboost")
        borders = (self.submitted_ns, read_from, first_token, ended)
        for name, start, end in zip(("queue", "prefill", "decode"), borders, borders[1:], strict=False):
            tracer.start_span(name, context=context, start_time=start).end(end)


def current_span() -> RequestSpan | None:
    """The span this request runs in, as it is handed to the runner; None without tracing."""
    if not is_enabled():
        return None
    from opentelemetry import trace

    span = trace.get_current_span()
    return RequestSpan(span, time.time_ns()) if span.is_recording() else None
