from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvboost.serve.app import ROUTES
from kvboost.serve.observability.requests import Tracing, is_enabled
from kvboost.serve.security.auth import tenant_of
from tests.serve.conftest import ADMIN_KEY, KEY, SECRET, Running

_SECRET = "the moon is made of cheese, but do not tell"
_TRACE, _PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
_ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": _SECRET * 3}],
    "max_tokens": 4,
    "temperature": 0,
    "stop": [_SECRET],
    "extra_headers": {"traceparent": f"00-{_TRACE}-{_PARENT}-01"},
}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # the official way works once in a process
    yield exporter
    provider.shutdown()


def _requests(spans: InMemorySpanExporter, *, count: int = 1) -> list[Any]:
    """The spans of so many requests. They end behind the last byte that a client waits for."""
    deadline = time.monotonic() + 30
    while True:
        found = [span for span in spans.get_finished_spans() if span.name.startswith("POST")]
        if len(found) >= count or time.monotonic() > deadline:
            assert len(found) == count
            return found
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_one_span_says_what_was_read_and_reused(
    client: openai.OpenAI, spans: InMemorySpanExporter, stream: bool
) -> None:
    usage: Any
    if stream:
        *_, last = client.chat.completions.create(**_ASKED, stream=True, stream_options={"include_usage": True})
        usage, answer_id = last.usage, last.id
    else:
        answer = client.chat.completions.create(**_ASKED)
        usage, answer_id = answer.usage, answer.id
    (request,) = _requests(spans)
    assert request.name == "POST /v1/chat/completions"
    assert request.kind is trace.SpanKind.SERVER
    assert format(request.context.trace_id, "032x") == _TRACE
    assert format(request.parent.span_id, "016x") == _PARENT
    attributes = dict(request.attributes)
    waited = attributes.pop("kvboost.waiting_ms")
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": answer_id,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "kvboost.exact_tokens": usage.kvboost["exact_tokens"],
        "kvboost.moved_tokens": 0,
        "kvboost.recomputed_tokens": 0,
        "kvboost.fresh_tokens": usage.kvboost["fresh_tokens"],
        "kvboost.bitwise": True,
        "kvboost.ttft_ms": usage.kvboost["ttft_ms"],
    }
    assert 0 <= waited <= usage.kvboost["ttft_ms"]


_BODIES: dict[str, dict[str, Any] | None] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"model": "tiny", "prompt": "x", "max_tokens": 1},
    "/v1/responses": {"model": "tiny", "input": "x", "max_output_tokens": 1},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [70]},
    "/v1/arrange": {"documents": ["x"]},
    **{path: {"text_1": "x", "text_2": "y"} for path in ("/score", "/v1/score")},
    **{path: {"query": "x", "documents": ["y"]} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    "/v1/cache/warm": {"prompt": "x" * 100, "tenant": tenant_of(KEY, SECRET)},
    "/v1/cache/pin": {"prompt": "x" * 100, "tenant": tenant_of(KEY, SECRET)},
    "/v1/cache/clear": None,
}


@pytest.mark.parametrize("path", [path for method, path in ROUTES if method == "POST"])
def test_every_route_answers_while_somebody_listens(keyed: Running, spans: InMemorySpanExporter, path: str) -> None:
    with keyed.http(ADMIN_KEY) as http:
        answer = http.post(path, json=_BODIES[path])
    assert answer.status_code == 200, answer.text
    (request,) = _requests(spans)
    assert request.name == f"POST {path}"
    assert request.attributes["http.response.status_code"] == 200
    generates = path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
    assert ("gen_ai.operation.name" in request.attributes) == generates


def test_nothing_a_client_wrote_is_told(keyed: Running, spans: InMemorySpanExporter) -> None:
    with keyed.http() as http:
        bodies: list[dict[str, Any]] = [
            {"model": "tiny", "prompt": _SECRET, "max_tokens": 2},
            {"model": _SECRET, "prompt": _SECRET},
            {"model": "tiny", "prompt": _SECRET, _SECRET: 3},
        ]
        statuses = [http.post("/v1/completions?q=" + _SECRET, json=body).status_code for body in bodies]
        assert statuses == [200, 404, 400]
        http.post("/v1/" + _SECRET, json={})
    requests = _requests(spans, count=3)
    assert [span.attributes["http.response.status_code"] for span in requests] == statuses
    everything = "".join(span.to_json() for span in spans.get_finished_spans())
    assert "moon" not in everything
    assert KEY not in everything


def test_who_has_no_key_makes_no_spans(keyed: Running, spans: InMemorySpanExporter) -> None:
    assert httpx.post(keyed.url + "/v1/completions", json={}).status_code == 401
    assert spans.get_finished_spans() == ()


def test_a_broken_traceparent_begins_a_new_trace(client: openai.OpenAI, spans: InMemorySpanExporter) -> None:
    client.completions.create(model="tiny", prompt="x", max_tokens=1, extra_headers={"traceparent": "00-zz-1-01"})
    (request,) = _requests(spans)
    assert request.parent is None


async def _call(app: Any) -> Any:
    return await app({"type": "http", "method": "POST", "path": "/x", "headers": []}, None, None)


def test_a_failure_tells_its_kind_and_not_its_words(spans: InMemorySpanExporter) -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError(_SECRET)

    with pytest.raises(KeyError):
        asyncio.run(_call(Tracing(fail, paths={"/x"})))
    (request,) = _requests(spans)
    assert request.status.status_code is trace.StatusCode.ERROR
    assert request.attributes["error.type"] == "KeyError"
    assert "moon" not in request.to_json()


def test_inside_another_span_it_is_a_part_of_that(spans: InMemorySpanExporter) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None: ...

    with trace.get_tracer("around").start_as_current_span("around") as around:
        asyncio.run(_call(Tracing(answer, paths={"/x"})))
    (request,) = _requests(spans)
    assert request.parent.span_id == around.get_span_context().span_id
    assert request.kind is trace.SpanKind.INTERNAL


def test_nobody_pays_who_set_no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        seen.append(send)

    send = object()
    app = Tracing(answer, paths={"/x"})
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
    assert not is_enabled(), "OpenTelemetry is there, but nobody has set a provider"
    asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # an import now raises
    assert not is_enabled()
    asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
    assert seen == [send, send], "what is sent is not even watched"
