"""What the server tells the span that OpenTelemetry's own instrumentation has opened for a request."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvboost.serve.observability.requests import current_span, is_enabled
from tests.serve.conftest import KEY, Running

_SECRET = "the moon is made of cheese, but do not tell"
_TRACE = "0af7651916cd43dd8448eb211c80319c"
_ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": _SECRET * 3}],
    "max_tokens": 4,
    "temperature": 0,
    "stop": [_SECRET],
}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # the official way works once in a process
    yield exporter
    provider.shutdown()


def _ask(running: Running, spans: InMemorySpanExporter, path: str, body: dict[str, Any]) -> tuple[httpx.Response, Any]:
    """The answer of the instrumented app, and the request's span."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=OpenTelemetryMiddleware(running.app, exclude_spans=["send", "receive"]))
        headers = {"Authorization": f"Bearer {KEY}", "traceparent": f"00-{_TRACE}-b7ad6b7169203331-01"}
        async with httpx.AsyncClient(transport=transport, base_url=running.url, headers=headers, timeout=60) as http:
            return await http.post(path, json=body)

    answer = asyncio.run(ask())
    (span,) = spans.get_finished_spans()
    return answer, span


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_span_says_what_was_read_and_reused(keyed: Running, spans: InMemorySpanExporter, stream: bool) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer, span = _ask(keyed, spans, "/v1/chat/completions", {**_ASKED, **more})
    assert answer.status_code == 200, answer.text
    *_, last, _ = answer.text.strip().split("\n\n") if stream else ("", answer.text, "")
    found = json.loads(last.removeprefix("data: "))
    usage = found["usage"]
    assert format(span.context.trace_id, "032x") == _TRACE
    attributes = {name: value for name, value in span.attributes.items() if name.startswith(("gen_ai.", "kvboost."))}
    waited = attributes.pop("kvboost.waiting_ms")
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": found["id"],
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "kvboost.exact_tokens": usage["kvboost"]["exact_tokens"],
        "kvboost.moved_tokens": 0,
        "kvboost.recomputed_tokens": 0,
        "kvboost.fresh_tokens": usage["kvboost"]["fresh_tokens"],
        "kvboost.bitwise": True,
        "kvboost.ttft_ms": usage["kvboost"]["ttft_ms"],
    }
    assert 0 <= waited <= usage["kvboost"]["ttft_ms"]
    assert "moon" not in span.to_json()
    assert KEY not in span.to_json()


def test_what_generates_nothing_adds_nothing(keyed: Running, spans: InMemorySpanExporter) -> None:
    answer, span = _ask(keyed, spans, "/tokenize", {"prompt": "x"})
    assert answer.status_code == 200
    assert not [name for name in span.attributes if name.startswith(("gen_ai.", "kvboost."))]


def test_nobody_pays_who_set_no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_enabled(), "OpenTelemetry is there, but nobody has set a provider"
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # an import now raises
    assert not is_enabled()
    assert current_span() is None
