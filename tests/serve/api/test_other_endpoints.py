from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from kvboost import CapacityError, KVBoost
from kvboost.engine.pinning import Pins
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve.security.auth import Keys
from kvboost.serve.security.limits import Limits
from tests.serve.conftest import ADMIN_KEY, KEY, OTHER_KEY, Running

_TEXT = "A cache keeps what was costly to make near to where it is used, until the room is needed for more. "
_ONE_TOKEN = {"model": "tiny", "max_tokens": 1, "temperature": 0}


def test_completions_of_text_and_ids_and_several(client: openai.OpenAI, keyed: Running) -> None:
    one = client.completions.create(model="tiny", prompt=_TEXT, temperature=0)
    assert one.choices[0].finish_reason == "length"
    assert one.usage is not None
    assert one.usage.completion_tokens == 16, "OpenAI's default"
    ids = client.completions.create(model="tiny", prompt=keyed.engine.encode(_TEXT), temperature=0)
    assert ids.choices[0].text == one.choices[0].text
    both = client.completions.create(model="tiny", prompt=[_TEXT, "Other"], n=2, temperature=0, max_tokens=3)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == one.choices[0].text[:3]
    assert both.usage is not None
    assert both.usage.prompt_tokens == len(_TEXT) + len("Other")
    assert both.usage.completion_tokens == 12


def test_completions_as_a_stream_with_log_probabilities(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": _TEXT, "temperature": 0, "max_tokens": 9, "logprobs": 2}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage is not None
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == len(logprobs.text_offset or []) == 9
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
    assert [token for part in streamed for token in part.tokens or []] == logprobs.tokens


def test_responses(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 8}
    whole = client.responses.create(**asked, input=_TEXT)
    assert whole.status in ("completed", "incomplete")
    assert whole.usage is not None
    assert whole.usage.input_tokens_details.cached_tokens >= 0
    assert whole.usage.output_tokens == 8
    assert whole.model_dump()["usage"]["kvboost"]["bitwise"] is True
    as_messages = client.responses.create(
        **asked, input=[{"role": "user", "content": [{"type": "input_text", "text": _TEXT}]}]
    )
    assert as_messages.output_text == whole.output_text
    events = list(client.responses.create(**asked, input=_TEXT, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    with client.responses.stream(**asked, input=_TEXT) as stream:  # the client's own bookkeeping agrees
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == text


@pytest.mark.parametrize("field", ["conversation", "prompt", "moderation"])
def test_responses_refuse_what_they_do_not_do(keyed: Running, field: str) -> None:
    with keyed.http() as http:
        answer = http.post("/v1/responses", json={"model": "tiny", "input": "x", field: None})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kvboost"


def test_tokens_there_and_back(keyed: Running) -> None:
    with keyed.http() as http:
        answer = http.post("/tokenize", json={"prompt": "Grüße"}).json()
        assert answer["count"] == len(answer["tokens"]) == 7
        assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "Grüße"}
        chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
        text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
        assert text == "<user>x\n<assistant>"
        parts = [answer["tokens"][:2], answer["tokens"][2:], []]
        assert http.post("/detokenize", json={"tokens": parts}).json() == {"prompt": ["Gr", "üße", ""]}
        assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
        for wrong in ([260], [[1], [260]], [[1]] * 1025, [1, [1]], ["x"]):
            refused = http.post("/detokenize", json={"tokens": wrong})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"].startswith("tokens")
        assert http.post("/tokenize", json={}).status_code == 400
        assert http.post("/tokenize", json={"prompt": "x", "model": "other"}).status_code == 404


def test_documents_are_put_behind_a_path_that_was_served(keyed: Running) -> None:
    """Sent as one message, the arranged prompt reuses more than the one as given."""
    one, two, three = (f"[{name}] " + _TEXT * 3 for name in ("one", "two", "three"))
    fields = {"head": "Read this.\n", "volatile": "It is Monday.\n", "question": "Which is it?", "ranks": "Best: {}.\n"}

    def reused(http: Any, texts: list[str]) -> int:
        asked = {**_ONE_TOKEN, "messages": [{"role": "user", "content": "".join(texts)}]}
        return int(http.post("/v1/chat/completions", json=asked).json()["usage"]["kvboost"]["exact_tokens"])

    with keyed.http() as http:
        first = http.post("/v1/arrange", json={"documents": [one, two], **fields}).json()
        assert (first["order"], first["served_tokens"]) == ([0, 1], 0)
        assert first["parts"] == ["Read this.\n", one, two, "Best: 1, 2.\n", "It is Monday.\n", "Which is it?"]
        reused(http, first["parts"])
        second = http.post("/v1/arrange", json={"documents": [three, two, one], **fields}).json()
        assert (second["order"], second["served_documents"]) == ([2, 1, 0], 2)
        assert second["served_tokens"] == len(one) + len(two)
        assert reused(http, second["parts"]) > len(one) + len(two)
        pinned = http.post("/v1/arrange", json={"documents": [three, one, two], **fields, "keep": [1, 0]}).json()
        assert pinned["order"][0] == 0
    with keyed.http(OTHER_KEY) as http:
        assert http.post("/v1/arrange", json={"documents": [two, one], **fields}).json()["order"] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "documents"),
        ({"documents": "x"}, "documents"),
        ({"documents": [1]}, "documents"),
        ({"documents": ["x"] * 129}, "documents"),
        ({"documents": ["x" * 100_000]}, "documents"),
        ({"documents": ["x"], "ranks": "{} {}"}, "ranks"),
        ({"documents": ["x"], "keep": [-1, 0]}, "keep"),
        ({"documents": ["x"], "keep": [1]}, "keep"),
        ({"documents": ["x"], "ranks": "Best"}, "ranks"),
        ({"documents": ["x"], "other": 1}, "other"),
    ],
)
def test_what_cannot_be_arranged_is_refused(keyed: Running, fields: dict[str, Any], param: str) -> None:
    with keyed.http() as http:
        answer = http.post("/v1/arrange", json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split(".")[0] == param


def test_health_and_readiness(keyed: Running) -> None:
    with keyed.http(None) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").status_code == 200
        keyed.service.draining = True
        try:
            assert http.get("/ready").status_code == 503
            assert http.get("/health").status_code == 200
            refused = http.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": "x"},
                headers={"Authorization": f"Bearer {KEY}"},
            )
            assert refused.status_code == 503
        finally:
            keyed.service.draining = False


def test_a_server_whose_runner_is_dead_says_so(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    running = start_server(make_engine())
    running.runner.close()
    with running.http() as http:
        for path in ("/health", "/ready"):
            answer = http.get(path)
            assert answer.status_code == 503
            assert answer.json().items() >= {"status": "failed", "reason": "the runner was closed"}.items()
        assert "kvboost_runner_alive 0.0" in http.get("/metrics").text
        refused = http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "server_error"


def test_answers_without_a_number_get_what_there_is_room_for(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    session = make_engine().session
    assert session is not None
    bytes_for = session.budget.bytes_for
    most = max(tokens for tokens in range(500) if bytes_for(tokens) <= bytes_for(200))
    engine = make_engine(kv_bytes=bytes_for(most))
    runner = BatchRunner(engine)
    running = start_server(engine, runner=runner, limits=Limits(max_new_tokens=1000))
    ids = [40] * (most - 10)
    with running.http() as http:
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": ids, "logit_bias": {"50": 100}})
        assert answer.status_code == 200, "16 tokens are OpenAI's default, 10 are what there is room for"
        assert answer.json()["usage"]["completion_tokens"] == 10
        chat = http.post("/v1/responses", json={"model": "tiny", "input": "x"})
        assert chat.status_code == 200
        refused = [
            http.post("/v1/completions", json={"model": "tiny", "prompt": ids, "max_tokens": 11}),
            http.post("/v1/completions", json={"model": "tiny", "prompt": [40] * most}),
            http.post("/v1/responses", json={"model": "tiny", "input": "x", "max_output_tokens": 500}),
            http.post("/v1/responses", json={"model": "tiny", "input": "x", "max_output_tokens": 1001}),
            http.post("/v1/responses", json={"model": "tiny", "input": "x" * 3000}),
        ]
    assert [answer.status_code for answer in refused] == [413, 413, 413, 400, 400]
    errors = [answer.json()["error"] for answer in refused]
    assert [e["param"] for e in errors] == ["max_tokens", "prompt", "max_output_tokens", "max_output_tokens", "input"]
    assert "lower max_output_tokens" in errors[2]["message"]
    assert not any("kv_bytes" in e["message"] for e in errors)


def test_metrics_count_what_happened(keyed: Running, client: openai.OpenAI) -> None:
    def read() -> dict[str, float]:
        with keyed.http(ADMIN_KEY) as http:
            lines = http.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    before = read()
    answers = [client.completions.create(model="tiny", prompt=_TEXT + "metrics " * 9, max_tokens=5) for _ in range(2)]
    after = read()

    def grown(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    cached = answers[1].usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]
    prompt = answers[1].usage.prompt_tokens  # type: ignore[union-attr]
    assert cached
    assert grown('kvboost_prompt_tokens_total{source="exact"}') >= cached
    sources = ("exact", "moved", "fresh")
    assert sum(grown(f'kvboost_prompt_tokens_total{{source="{source}"}}') for source in sources) == 2 * prompt
    ends = [name for name in after if name.startswith('kvboost_requests_total{endpoint="completions"')]
    assert sum(grown(name) for name in ends) == 2
    assert grown("kvboost_ttft_seconds_count") == 2
    assert grown('kvboost_http_responses_total{status="200"}') >= 2
    assert after['kvboost_store_bytes{tier="memory"}'] > 0
    assert after["kvboost_jobs_one_by_one"] == 0


def test_the_cache_for_the_admin(keyed: Running, client: openai.OpenAI) -> None:
    text = _TEXT + "the admin has read this ahead " * 4
    with keyed.http(ADMIN_KEY) as http:
        tenants = http.get("/v1/cache").json()["tenants"]
        assert len(tenants) == 2
        assert http.post("/v1/cache/warm", json={"prompt": text}).status_code == 400, "for whom?"
        assert http.post("/v1/cache/warm", json={"prompt": text, "tenant": "x"}).status_code == 400
        warmed = http.post("/v1/cache/warm", json={"prompt": text, "tenant": tenants[0]})
        assert warmed.status_code == 200, warmed.text
        answer = client.completions.create(model="tiny", prompt=text, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens
        shown = http.get("/v1/cache").json()
        assert shown["cache"]["hot_chunks"] > 0
        assert shown["requests"][-1]["exact"] == answer.usage.prompt_tokens_details.cached_tokens
        assert text[:20] not in str(shown)
        assert http.post("/v1/cache/clear").json()["cleared"] is True
        assert http.get("/v1/cache").json()["cache"]["hot_chunks"] == 0


@pytest.mark.parametrize("key", [KEY, OTHER_KEY, ADMIN_KEY, None])
def test_forgetting_reaches_what_an_earlier_process_left_on_a_disk(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost], tmp_path: Path, key: str | None
) -> None:
    keys = Keys([KEY, OTHER_KEY], admin_key=ADMIN_KEY) if key else None
    asked = {"model": "tiny", "prompt": _TEXT * 2, "max_tokens": 1}

    def cached(running: Running) -> int:
        with running.http(key) as http:
            usage = http.post("/v1/completions", json=asked).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def restarted() -> Running:
        return start_server(make_engine(disk_cache_dir=tmp_path), keys=keys)

    first = restarted()
    assert cached(first) == 0
    first.engine.close()
    second = restarted()
    assert cached(second) > 0, "it is there after a restart"
    second.engine.close()
    other = Keys(["a-new-key"], admin_key="a-new-admin") if key else None  # the tenants' keys are revoked
    third = start_server(make_engine(disk_cache_dir=tmp_path), keys=other)
    with third.http("a-new-admin") as http:
        assert http.post("/v1/cache/clear").status_code == 200
    third.engine.close()
    fourth = restarted()
    assert cached(fourth) == 0
    fourth.engine.close()


def test_forgetting_takes_the_replies_along(keyed: Running) -> None:
    memory = keyed.service.chats.replies
    memory.remember(tenant="t", cache_key="", before="b", reply="r", ids=[1, 2])
    assert memory.find(tenant="t", cache_key="", before="b", reply="r") == [1, 2]
    with keyed.http(ADMIN_KEY) as http:
        assert http.post("/v1/cache/clear").status_code == 200
    assert memory.find(tenant="t", cache_key="", before="b", reply="r") is None


def test_pins_outlive_what_else_is_read(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    engine = make_engine(max_chunks=12)
    running = start_server(engine)
    text = _TEXT + "this stays where it is, whatever comes after it"
    with running.http(None) as http:
        pin = http.post("/v1/cache/pin", json={"prompt": text}).json()
        assert pin["chunks"] >= 2
        assert http.get("/v1/cache").json()["pins"] == [{k: v for k, v in pin.items() if k != "object"}]
        for number in range(24):
            http.post("/v1/cache/warm", json={"prompt": f"{number} " * 60})
        assert engine.cache_stats()["evictions"] > 0
        again = http.post("/v1/completions", json={"model": "tiny", "prompt": text, "max_tokens": 1}).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == pin["tokens"] - 1  # the last one is computed
        assert http.delete(f"/v1/cache/pin/{pin['id']}").status_code == 200
        assert http.delete(f"/v1/cache/pin/{pin['id']}").status_code == 404
        assert engine._store.stats().leased == 0
        assert http.post("/v1/cache/pin", json={"prompt": "s"}).status_code == 400


def test_pins_leave_room_for_others(make_engine: Callable[..., KVBoost]) -> None:
    engine = make_engine(cache_bytes=40_000)
    text = engine.encode(_TEXT * 2)
    engine.warm(text)
    pins = Pins(max_share=0.01)
    with pytest.raises(CapacityError, match="unpin"):
        pins.add(engine.session, text)
    assert engine._store.stats().leased == 0


def test_the_hottest_chunks_are_told_by_numbers(keyed: Running, client: openai.OpenAI) -> None:
    text = "often " * 40
    for _ in range(6):
        client.completions.create(model="tiny", prompt=text, max_tokens=1)
    with keyed.http(ADMIN_KEY) as http:
        hottest = http.get("/v1/cache").json()["hottest"]
    assert hottest[0]["uses"] >= 5
    assert [chunk["uses"] for chunk in hottest] == sorted((chunk["uses"] for chunk in hottest), reverse=True)
    assert set(hottest[0]) == {"key", "uses", "start", "tokens", "bytes"}
