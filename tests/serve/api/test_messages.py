from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from jsonschema import validate

from kvboost import KVBoost
from kvboost.scheduler.jobs import Finished, Job, NewToken, RunnerLoad
from kvboost.serve.generation.turns import turns_of_messages
from kvboost.serve.schemas.messages import CountTokensRequest
from tests.helpers.runner import Scripted
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.conftest import KEY, Running

_SYSTEM = "An agent is terse and will never, ever repeat yourself in any answer at all."
_QUESTION = "Tell me about caches, please, in one sentence of moderate length."
_USER: dict[str, Any] = {"role": "user", "content": _QUESTION}
_GREEDY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "temperature": 0,
    "system": _SYSTEM,
    "messages": [_USER],
}
_MARK = {"type": "ephemeral", "ttl": "1h"}
_WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
_CLOCK = {"name": "look.at-clock", "input_schema": {"type": "object", "additionalProperties": False}}
_TWO_CALLS = (
    "I will look both up.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
)


def _tools_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{# <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


@pytest.fixture(scope="module")
def running(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Running:
    engine = make_engine()
    engine.tokenizer = _tools_tokenizer()
    return start_server(engine)


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with running.http(None) as made:
        yield made


def _ask(http: httpx.Client, **changed: Any) -> dict[str, Any]:
    answer = http.post("/v1/messages", json={**_GREEDY, **changed})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    return message


def _events(http: httpx.Client, **changed: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/messages", json={**_GREEDY, **changed, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for written in answer.text.strip().split("\n\n"):
        name, data = written.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    return events


def _refusal(answer: httpx.Response) -> tuple[int, str, str]:
    """The status, the type and the message of a refusal, which is in Anthropic's shape and nothing else."""
    told = answer.json()
    assert (told.pop("type"), set(told)) == ("error", {"error"})
    assert set(told["error"]) == {"type", "message"}
    return answer.status_code, told["error"]["type"], told["error"]["message"]


def test_a_whole_message(http: httpx.Client) -> None:
    message = _ask(http)
    usage = message.pop("usage")
    assert message.pop("id").startswith("msg_")
    (block,) = message.pop("content")
    assert block["type"] == "text"
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "stop_reason": "max_tokens",
        "stop_sequence": None,
    }
    assert usage["output_tokens"] == 12


def test_a_stream_has_anthropics_events_and_says_the_same(http: httpx.Client) -> None:
    whole = _ask(http)
    events = _events(http)
    names = [event["type"] for event in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    total = sum(whole["usage"][name] for name in ("input_tokens", "cache_read_input_tokens"))
    assert events[0]["message"]["usage"]["input_tokens"] == total
    assert {event["index"] for event in events if "index" in event} == {0}
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 12


def test_usage_counts_each_token_of_the_prompt_once(http: httpx.Client) -> None:
    text = "Count. " + _SYSTEM
    system = [{"type": "text", "text": text, "cache_control": _MARK}]
    cold, warm = (_ask(http, system=system)["usage"] for _ in range(2))
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    marked = len("<system>" + text)
    prompt = marked + len("\n<user>" + _QUESTION + "\n<assistant>")
    assert [cold[name] for name in names] == [prompt - marked, 0, marked]
    assert sum(warm[name] for name in names) == prompt
    assert warm["cache_read_input_tokens"] >= marked
    assert warm["cache_creation_input_tokens"] == 0
    assert warm["kvboost"]["exact_tokens"] == warm["cache_read_input_tokens"]
    asked = {name: value for name, value in _GREEDY.items() if name not in ("max_tokens", "temperature")}
    counted = http.post("/v1/messages/count_tokens", json={**asked, "system": system})
    assert counted.json() == {"input_tokens": prompt}


def test_what_an_agent_sends_again_is_read_from_the_cache(http: httpx.Client) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00001;"},
        {"type": "text", "text": _SYSTEM + " (agent)"},
    ]
    first = _ask(http, system=system)
    prompt = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
    system[0] = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=fffff;"}
    turns = [_USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "Go on."}]
    second = _ask(http, system=system, messages=turns)
    assert second["usage"]["cache_read_input_tokens"] >= prompt, "all of the first turn"


def test_marks_are_chunk_boundaries(http: httpx.Client, running: Running) -> None:
    blocks = [
        {"type": "text", "text": "a" * 40, "cache_control": _MARK},
        {"type": "text", "text": "b" * 5, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "c" * 50},
    ]
    _ask(http, system=None, messages=[{"role": "user", "content": blocks}])
    boundaries = running.runner.jobs[-1].boundaries
    assert boundaries[:2] == (len("<user>") + 40, len("<user>") + 46)


def test_stop_sequences(http: httpx.Client) -> None:
    whole = _ask(http)["content"][0]["text"]
    stop = whole[4:7]
    cut = _ask(http, stop_sequences=["never in there", stop])
    assert cut["content"][0]["text"] == whole[: whole.index(stop)]
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert _events(http, stop_sequences=[stop])[-2]["delta"]["stop_sequence"] == stop


def test_a_message_without_text_has_an_empty_block(http: httpx.Client) -> None:
    stop = _ask(http)["content"][0]["text"][:1]
    assert _ask(http, stop_sequences=[stop])["content"] == [{"type": "text", "text": ""}]


def test_more_tokens_than_there_are_is_as_many_as_there_are(http: httpx.Client) -> None:
    message = _ask(http, max_tokens=32_000)
    assert message["usage"]["output_tokens"] <= 64
    assert _ask(http, max_tokens=3)["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"])
def test_a_call_can_be_demanded(http: httpx.Client, choice: Any) -> None:
    asked = {"tools": [_WEATHER, _CLOCK], "tool_choice": choice, "max_tokens": 64}
    message = _ask(http, **asked)
    (block,) = message["content"]
    assert (message["stop_reason"], block["type"]) == ("tool_use", "tool_use")
    if block["name"] == "get_weather":
        validate(block["input"], _WEATHER["input_schema"])
    else:
        assert (choice["type"], block["name"], block["input"]) == ("any", "look.at-clock", {})
    events = _events(http, **asked)
    (begun,) = [event for event in events if event["type"] == "content_block_start"]
    assert begun["content_block"] == {**block, "id": begun["content_block"]["id"], "input": {}}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == block["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_json_can_be_demanded(http: httpx.Client) -> None:
    format_ = {"type": "json_schema", "schema": _WEATHER["input_schema"]}
    for asked in ({"output_config": {"format": format_, "effort": "low"}}, {"output_format": format_}):
        message = _ask(http, **asked, max_tokens=64)
        validate(json.loads(message["content"][0]["text"]), _WEATHER["input_schema"])
        assert message["stop_reason"] == "end_turn"


class _Recorded(Scripted):
    """A runner that answers every job with a text recorded before."""

    def __init__(self, tokenizer: Any, text: str, *, error: str | None = None) -> None:
        self._ids, self._error = tokenizer(text)["input_ids"], error
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> Any:
        self.jobs.append(job)
        return self

    def events(self) -> Any:
        yield from (NewToken(token) for token in self._ids)
        yield Finished("error" if self._error else "stop", None, error=self._error)

    def load(self) -> RunnerLoad:
        return RunnerLoad(0, 0, 0)

    def close(self) -> None: ...


def _answering(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost], text: str, **arguments: Any
) -> Running:
    engine = make_engine()
    engine.tokenizer = _tools_tokenizer()
    return start_server(engine, runner=_Recorded(engine.tokenizer, text, **arguments))


def test_calls_and_their_results(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> None:
    running = _answering(start_server, make_engine, _TWO_CALLS)
    with running.http(None) as http:
        message = _ask(http, tools=[_WEATHER])
        text, *calls = message["content"]
        assert text["text"].strip() == "I will look both up."
        assert [(call["name"], call["input"]) for call in calls] == [
            ("get_weather", {"city": "Paris"}),
            ("get_weather", {"city": "Zürich"}),
        ]
        assert message["stop_reason"] == "tool_use"
        starts = [event for event in _events(http, tools=[_WEATHER]) if event["type"] == "content_block_start"]
        assert [event["index"] for event in starts] == [0, 1, 2]
        one = _ask(http, tools=[_WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block["type"] for block in one["content"]] == ["text", "tool_use"]
        none = _ask(http, tools=[_WEATHER], tool_choice={"type": "none"})
        assert (none["stop_reason"], none["content"][0]["text"]) == ("end_turn", _TWO_CALLS)
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]}
            for call in calls
        ]
        turns = [_USER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": results}]
        _ask(http, tools=[_WEATHER], messages=turns)
    rendered = running.engine.tokenizer.decode(list(running.runner.jobs[-1].token_ids))
    assert '"arguments": {"city": "Zürich"}' in rendered
    assert rendered.endswith("<tool>rain\n<tool>rain\n<assistant>")


def test_reasoning_is_a_block_of_its_own(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    engine = make_engine()
    engine.tokenizer = _tools_tokenizer()
    engine.tokenizer.chat_template += "{# <think> {{ enable_thinking }} #}"
    running = start_server(engine, runner=_Recorded(engine.tokenizer, "<think>\nHm.\n</think>\n\nRain."))
    with running.http(None) as http:
        thought, said = _ask(http)["content"]
        assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
        assert said == {"type": "text", "text": "Rain."}
        deltas = [event["delta"] for event in _events(http) if event["type"] == "content_block_delta"]
        assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm."
        turns = [_USER, {"role": "assistant", "content": [thought, said]}, _USER]
        assert _ask(http, messages=turns, thinking={"type": "enabled", "budget_tokens": 1024})["content"][1] == said


def test_a_stream_that_fails_says_so_in_its_last_event(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    running = _answering(start_server, make_engine, "Half of", error="out of memory")
    with running.http(None) as http:
        last = _events(http)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        assert "log" in last["error"]["message"]
        assert _refusal(http.post("/v1/messages", json=_GREEDY))[:2] == (500, "api_error")


def _turns(**body: Any) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    turns = turns_of_messages(CountTokensRequest.model_validate({"model": "m", **body}))
    return [(turn.fields, turn.marks) for turn in turns]


def test_blocks_become_turns() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain", "cache_control": _MARK}
    turns = _turns(
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief", "cache_control": _MARK}],
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "user", "content": [{"type": "text", "text": "In Paris"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me see", "citations": None},
                    call,
                ],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
            {"role": "system", "content": "Now be kind"},
        ],
    )
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert turns == [
        ({"role": "system", "content": "Be\nbrief"}, ((8, 3600),)),
        ({"role": "user", "content": "Weather?\nIn Paris"}, ()),
        (
            {
                "role": "assistant",
                "content": "Let me see",
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
                "reasoning_content": "Hm.",
            },
            (),
        ),
        ({"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "get_weather"}, ((4, 3600),)),
        ({"role": "user", "content": "So?"}, ()),
        ({"role": "system", "content": "Now be kind"}, ()),
    ]


def test_the_line_that_changes_with_every_request_is_left_out() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=00001;"
    assert _turns(system=line + "\nBe brief", messages=[_USER])[0][0]["content"] == "Be brief"
    assert _turns(system=line, messages=[_USER])[0][0]["role"] == "user"
    said = {"role": "user", "content": line}
    assert _turns(messages=[said])[0][0]["content"] == line, "what a user says stays"


_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"messages": [{"role": "user", "content": [_IMAGE]}]}, "messages.0.content.0: .*text only; leave out image"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [_IMAGE]}]}
                ]
            },
            "messages.0.content.0.content.0: .*text only; leave out image",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content.0: .*text or tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages.0.content.0: .*text or tool_use"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content: .*list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages.0: .*user holds no block of type thinking",
        ),
        ({"messages": [_USER, {"role": "assistant", "content": "{"}]}, "does not continue; end with a user's"),
        ({"messages": []}, "messages: give 1 or more entries"),
        ({"max_tokens": None}, "max_tokens: give a whole number"),
        ({"max_tokenz": 3}, "max_tokenz is not supported"),
        ({"stop": ["x"]}, "did you mean stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools.0.type: .*custom"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: .*name"),
        ({"tool_choice": {"type": "tool", "name": "fly"}, "tools": [_CLOCK]}, "not in tools"),
        ({"stop_sequences": [""]}, "stop_sequences.0: .*1 to 256"),
        (
            {"tools": [_CLOCK], "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "do not go together",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {"a": "\ud800"}}],
                    },
                    _USER,
                ]
            },
            "surrogates not allowed",
        ),
    ],
)
def test_refusals_are_in_anthropics_shape(http: httpx.Client, changed: Any, told: str) -> None:
    body = json.dumps({**_GREEDY, **changed})
    status, kind, message = _refusal(
        http.post("/v1/messages", content=body, headers={"Content-Type": "application/json"})
    )
    assert (status, kind) == (400, "invalid_request_error")
    assert re.search(told, message), message


def test_other_refusals(keyed: Running) -> None:
    with keyed.http(None) as http:
        assert _refusal(http.post("/v1/messages", json=_GREEDY))[:2] == (401, "authentication_error")
        assert _refusal(http.get("/v1/messages", headers={"x-api-key": KEY}))[:2] == (405, "invalid_request_error")
        headers = {"x-api-key": KEY}
        other = http.post("/v1/messages/count_tokens", json={**_GREEDY, "model": "other"}, headers=headers)
        assert other.status_code == 400, "count_tokens takes no max_tokens"
        other = http.post("/v1/messages", json={**_GREEDY, "model": "other"}, headers=headers)
        assert _refusal(other)[:2] == (404, "not_found_error")
        large = http.post("/v1/messages", content=b" " * (4 * 2**20 + 1), headers=headers)
        assert _refusal(large)[:2] == (413, "request_too_large")
        no_tools = http.post("/v1/messages", json={**_GREEDY, "tools": [_CLOCK]}, headers=headers)
        assert "takes no tools" in _refusal(no_tools)[2]


def test_anthropics_header_carries_a_key(keyed: Running) -> None:
    with keyed.http(None) as http:
        assert http.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
        assert http.get("/v1/cache", headers={"x-api-key": KEY}).status_code == 403
        assert http.get("/v1/models", headers={"x-api-key": KEY + "x"}).status_code == 401
        wrong = {"x-api-key": KEY, "Authorization": "Bearer wrong-key-of-somebody"}
        assert http.get("/v1/models", headers=wrong).status_code == 401, "one wrong key is enough"
        twice = [("x-api-key", KEY), ("x-api-key", KEY)]
        assert http.get("/v1/models", headers=twice).status_code == 401
        assert http.post("/v1/messages", json=_GREEDY, headers={"x-api-key": KEY}).status_code == 200


def test_fields_without_effect_are_taken_and_named(http: httpx.Client) -> None:
    inert = {
        "metadata": {"user_id": "somebody"},
        "service_tier": "auto",
        "thinking": {"type": "disabled"},
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
        "mcp_servers": [],
        "container": None,
    }
    assert _ask(http, **inert)["content"] == _ask(http)["content"]
    told = http.post("/v1/messages", json={**_GREEDY, **inert}).headers["x-kvboost-ignored"]
    fields = {"metadata", "service_tier", "thinking", "context_management", "cache_control"}
    assert set(told.split(", ")) == fields
    call = {"type": "tool_use", "id": "c", "name": "clock", "input": {}, "caller": {"type": "direct"}}
    call["cache_control"] = _MARK
    result = {"type": "tool_result", "tool_use_id": "c", "content": "noon", "is_error": False}
    nested = {
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        "system": [{"type": "text", "text": _SYSTEM, "cache_control": _MARK}],
        "tools": [{**_CLOCK, "cache_control": _MARK, "eager_input_streaming": True, "strict": True}] * 2,
        "messages": [_USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result] * 2}, _USER],
    }
    told = http.post("/v1/messages", json={**_GREEDY, **nested}).headers["x-kvboost-ignored"]
    assert sorted(told.split(", ")) == [
        "messages.content.caller",
        "messages.content.is_error",
        "messages.content.tool_use.cache_control",
        "thinking",
        "thinking.budget_tokens",
        "thinking.display",
        "tools.cache_control",
        "tools.eager_input_streaming",
        "tools.strict",
    ]
