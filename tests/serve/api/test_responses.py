from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from jsonschema import validate

from kvboost import KVBoost
from kvboost.serve.api.responses import ItemEvents
from kvboost.serve.generation import turns as remembered
from kvboost.serve.generation.parts import Content, Reasoning
from kvboost.serve.generation.turns import ResponseMemory, Turn, turns_of_items
from kvboost.serve.schemas.responses import ResponsesRequest
from kvboost.serve.security.auth import Keys
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.conftest import ADMIN_KEY, KEY, OTHER_KEY, Running

_PAINT: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "gr\u00fcn"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
_TOOL: Any = {"type": "function", "name": "paint", "description": "Paints", "parameters": _PAINT, "strict": True}
_TEXT = "A cache keeps what was costly to make near to where it is used, until the room is needed for more. "
_GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 64}


@pytest.fixture(scope="module")
def running(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Running:
    engine = make_engine()
    engine.tokenizer = byte_tokenizer()
    engine.tokenizer.chat_template = (
        "{% if messages[-1].content == 'fail' %}{{ raise_exception('no') }}{% endif %}"
        "{# <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return start_server(engine, keys=Keys([KEY, OTHER_KEY], admin_key=ADMIN_KEY))


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with running.openai() as made:
        yield made


def _prompt(running: Running) -> str:
    """The prompt of the last job."""
    text: str = running.engine.tokenizer.decode(list(running.runner.jobs[-1].token_ids))
    return text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "paint"}], ids=["required", "named"])
def test_a_function_is_called_and_answers(client: openai.OpenAI, running: Running, choice: Any) -> None:
    asked: dict[str, Any] = {**_GREEDY, "tools": [_TOOL], "tool_choice": choice}
    called = client.responses.create(**asked, input="Paint it")
    (item,) = called.output
    assert item.type == "function_call"
    assert (called.status, item.status, item.name) == ("completed", "completed", "paint")
    validate(json.loads(item.arguments), _PAINT)
    assert called.tools[0].model_dump()["parameters"] == _PAINT
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "It is painted"}
    sent: Any = [{"role": "user", "content": "Paint it"}, item.model_dump(exclude_none=True), result]
    client.responses.create(**{**asked, "tool_choice": "none"}, input=sent)
    whole = _prompt(running)
    assert json.dumps(json.loads(item.arguments), ensure_ascii=False) in whole
    assert whole.endswith("<tool>It is painted\n<assistant>")
    client.responses.create(**{**asked, "tool_choice": "none"}, input=[result], previous_response_id=called.id)
    assert _prompt(running) == whole, "the server remembers what it was sent and what it answered"


def test_a_call_is_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**_GREEDY, "tools": [_TOOL], "tool_choice": "required", "input": "Paint it"}
    (whole,) = client.responses.create(**asked).output
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if not event.type.endswith(".delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == whole.arguments  # type: ignore[union-attr]
    assert events[2].item.arguments == ""  # type: ignore[union-attr]
    assert events[-1].response.output[0].arguments == whole.arguments  # type: ignore[union-attr]
    with client.responses.stream(**asked) as stream:  # the client's own bookkeeping agrees
        final = stream.get_final_response()
    assert final.output[0].arguments == whole.arguments  # type: ignore[union-attr]


def test_a_conversation_goes_on_from_a_response(client: openai.OpenAI, running: Running) -> None:
    first = client.responses.create(**_GREEDY, input=_TEXT, instructions="Be brief.")
    second = client.responses.create(**_GREEDY, input="Go on", previous_response_id=first.id)
    assert _prompt(running) == f"<user>{_TEXT}\n<assistant>{first.output_text}\n<user>Go on\n<assistant>"
    assert second.previous_response_id == first.id
    third = client.responses.create(**_GREEDY, input="And?", previous_response_id=second.id)
    said = f"<user>{_TEXT}\n<assistant>{first.output_text}\n<user>Go on\n<assistant>{second.output_text}\n<user>And?"
    assert _prompt(running).startswith(said)
    assert third.usage is not None
    assert third.usage.input_tokens_details.cached_tokens > len(_TEXT)


def test_a_response_that_nobody_remembers_is_refused(client: openai.OpenAI, running: Running) -> None:
    def refusal(asking: openai.OpenAI, response: str) -> Any:
        with pytest.raises(openai.BadRequestError, match="send the whole conversation in input") as refused:
            asking.responses.create(**_GREEDY, input="Go on", previous_response_id=response)
        return refused.value.code

    assert refusal(client, "resp_unknown") == "previous_response_not_found"
    unstored = client.responses.create(**_GREEDY, input="x", store=False)
    assert unstored.store is False
    assert refusal(client, unstored.id)
    stored = client.responses.create(**_GREEDY, input="x")
    with running.openai(OTHER_KEY) as other:
        assert refusal(other, stored.id), "of another key"
    with running.http(ADMIN_KEY) as http:
        assert http.post("/v1/cache/clear").status_code == 200
    assert refusal(client, stored.id), "cleared"


def test_a_server_that_drains_waits_until_a_response_is_remembered(
    client: openai.OpenAI, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember, answering = running.service.responses.remember, []

    def noted(*given: Any, **more: Any) -> None:
        answering.append(running.service.streams.held)
        remember(*given, **more)

    monkeypatch.setattr(running.service.responses, "remember", noted)
    client.responses.create(**_GREEDY, input="x")
    assert answering == [1]


def _turn(text: str) -> Turn:
    return Turn({"role": "user", "content": text})


def test_the_memory_of_responses_is_bounded_for_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MAX_RESPONSES", 3)
    monkeypatch.setattr(remembered, "_MAX_BYTES", 3000)
    memory = ResponseMemory(10**6)
    memory.remember("other", [_turn("x")], tenant="b")
    for number in range(5):
        memory.remember(f"r{number}", [_turn("x")], tenant="a")
    assert [number for number in range(5) if memory.find(f"r{number}", tenant="a") is not None] == [2, 3, 4]
    memory.remember("large", [_turn("x" * 2800)], tenant="a")
    assert memory.find("large", tenant="a") is not None
    assert memory.find("r4", tenant="a") is None
    memory.remember("too large", [_turn("x" * 3000)], tenant="a")
    assert memory.find("too large", tenant="a") is None
    assert memory.find("other", tenant="b") is not None
    assert memory.find("other", tenant="a") is None


def test_the_memory_of_responses_is_bounded_for_all_tenants_together() -> None:
    memory = ResponseMemory(4000)
    memory.remember("small", [_turn("x")], tenant="a")
    memory.remember("first", [_turn("\u00e4" * 700)], tenant="b")
    memory.remember("second", [_turn("x" * 1400)], tenant="b")
    assert memory.find("first", tenant="b") is not None
    memory.remember("other", [_turn("x" * 900)], tenant="c")
    assert memory.find("first", tenant="b") is None, "the oldest of who has most"
    for tenant, kept in (("a", "small"), ("b", "second"), ("c", "other")):
        assert memory.find(kept, tenant=tenant) is not None, kept
    memory.remember("too large", [_turn("x" * 5000)], tenant="a")
    assert memory.find("too large", tenant="a") is None
    memory.clear()
    memory.remember("again", [_turn("x" * 3000)], tenant="b")
    assert memory.find("again", tenant="b") is not None


def test_the_memory_of_responses_takes_no_more_than_its_bound() -> None:
    """What clients send in few bytes can take many as objects."""
    memory = ResponseMemory(200_000)
    tracemalloc.start()
    try:
        for number in range(6):
            call = {"function": {"name": "f", "arguments": {"a": [[] for _ in range(10_000)]}}}
            memory.remember(str(number), [Turn({"role": "assistant", "tool_calls": [call]})], tenant="a")
        del call
        assert tracemalloc.get_traced_memory()[0] < 300_000
    finally:
        tracemalloc.stop()


def test_turns_are_remembered_as_they_were() -> None:
    memory = ResponseMemory(10**6)
    call = {"function": {"name": "f", "arguments": {"\u00e4": ["\ud800", 1.5, None]}}}
    turns = [
        Turn({"role": "user", "content": "a\nb"}, ((1, 300),), (1, 3)),
        Turn({"role": "assistant", "tool_calls": [call]}),
    ]
    memory.remember("r", turns, tenant="a")
    assert memory.find("r", tenant="a") == turns
    assert memory.nbytes("r", tenant="a") > memory.nbytes("r", tenant="b") == 0


def test_items_become_turns() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "paint", "arguments": '{"colour": "red"}', "id": "fc_1"}
    text = {"type": "output_text", "text": "Well", "annotations": [], "logprobs": []}
    thought = {"type": "reasoning_text", "text": "Hm"}
    body = ResponsesRequest.model_validate(
        {
            "model": "m",
            "input": [
                {"role": "developer", "content": "Be kind"},
                {"role": "user", "content": [{"type": "input_text", "text": "Paint it"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]},
                {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [text]},
                call,
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Done"}]},
            ],
        }
    )
    function = {"name": "paint", "arguments": {"colour": "red"}}
    assert [turn.fields for turn in turns_of_items(body.input)] == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Paint it"},
        {
            "role": "assistant",
            "content": "Well",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            "reasoning_content": "Hm",
        },
        {"role": "tool", "content": "Done", "tool_call_id": "c1"},
    ]


_CALL = {"type": "function_call", "call_id": "c", "name": "paint", "arguments": "{}"}
_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}


@pytest.mark.parametrize(
    ("changed", "param", "told"),
    [
        ({"input": [{"role": "user", "content": [_IMAGE]}]}, "input.0.content.0", "text only; leave out input_image"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "message or function_call"),
        ({"input": 3}, "input", "list"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"background": True}, "background", "give false"),
        ({"max_tokens": 5}, "max_tokens", "did you mean max_output_tokens?"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "did you mean max_output_tokens?"),
        ({"messages": []}, "messages", "did you mean input?"),
        ({"input": [_CALL | {"arguments": "{"}]}, "input", "are no JSON"),
        ({"input": [_CALL | {"arguments": "[]"}]}, "input", "are no JSON object"),
        ({"input": [{"role": "user", "content": "fail"}]}, "input", "chat template does not take these messages"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"tools": [_TOOL], "text": {"format": {"type": "json_object"}}}, "text.format", "do not go together"),
    ],
)
def test_what_is_not_served_is_refused_by_name(running: Running, changed: Any, param: str, told: str) -> None:
    with running.http() as http:
        answer = http.post("/v1/responses", json={**_GREEDY, "input": "x", **changed})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert told in answer.json()["error"]["message"]


def test_fields_without_effect_are_taken_and_named(client: openai.OpenAI) -> None:
    plain = client.responses.with_raw_response.create(**_GREEDY, input=_TEXT, truncation="disabled", store=True)
    assert "x-kvboost-ignored" not in plain.headers, "these say what is done anyway"
    inert: dict[str, Any] = {
        "metadata": {"a": "b"},
        "user": "somebody",
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "service_tier": "auto",
        "safety_identifier": "x",
        "max_tool_calls": 3,
        "text": {"verbosity": "low"},
    }
    told = client.responses.with_raw_response.create(**_GREEDY, **inert, input=_TEXT, parallel_tool_calls=True)
    answer = told.parse()
    assert answer.output_text == plain.parse().output_text
    assert answer.metadata == {"a": "b"}
    nested = {"reasoning.effort", "reasoning.summary", "text.verbosity"}
    assert set(told.headers["x-kvboost-ignored"].split(", ")) == inert.keys() - {"reasoning", "text"} | nested
    options: Any = {"stream": True, "stream_options": {"include_obfuscation": False}}
    with client.responses.with_streaming_response.create(**_GREEDY, input=_TEXT, **options) as stream:
        assert stream.headers["x-kvboost-ignored"] == "stream_options.include_obfuscation"


def test_a_response_without_any_item_gets_an_empty_message() -> None:
    events = ItemEvents()
    names = [name for name, _ in events.end("completed")]
    assert names[0] == "response.output_item.added"
    assert names[-1] == "response.output_item.done"
    assert [(item["type"], item["content"][0]["text"]) for item in events.output] == [("message", "")]


def test_reasoning_is_an_item_of_its_own() -> None:
    events = ItemEvents()
    written = [event for part in (Reasoning("Hm"), Reasoning("!"), Content("Well")) for event in events.add(part)]
    written += events.end("incomplete")
    thought, said = events.output
    assert (thought["type"], thought["status"], thought["content"][0]["text"]) == ("reasoning", "completed", "Hm!")
    assert (said["type"], said["status"], said["content"][0]["text"]) == ("message", "incomplete", "Well")
    deltas = [fields["delta"] for name, fields in written if name == "response.reasoning_text.delta"]
    assert deltas == ["Hm", "!"]
    assert [turn.fields for turn in turns_of_items(events.as_input())] == [
        {"role": "assistant", "content": "Well", "reasoning_content": "Hm!"}
    ]
