from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvboost.serve import Keys, Limits
from kvboost.serve.security.bodies import VALUES, ClientGoneError, disconnected, has_more, parse, while_connected
from tests.serve.asgi import ask
from tests.serve.conftest import ADMIN_KEY, KEY, Running

_BYTES = 4 * 2**20 - 200


def _filled(before: str, entry: str, after: str) -> str:
    """A body as large as the server takes, of as many entries as go in."""
    return before + ",".join([entry] * (_BYTES // (len(entry) + 1))) + after


def _fields(before: str, after: str) -> str:
    return before + ",".join(f'"{number}":"x"' for number in range(_BYTES // 13)) + after


_WRONG = {
    "prompts": ("/v1/completions", "prompt", _filled('{"model":"tiny","prompt":[', "{}", "]}")),
    "ids": ("/v1/completions", "prompt", _filled('{"model":"tiny","prompt":[0,', "{}", "]}")),
    "inner ids": ("/v1/completions", "prompt", _filled('{"model":"tiny","prompt":[[0,', "{}", "]]}")),
    "messages": ("/v1/chat/completions", "messages", _filled('{"model":"tiny","messages":[', "0", "]}")),
    "good messages": (
        "/v1/chat/completions",
        "messages",
        _filled('{"model":"tiny","messages":[', '{"role":"user"}', "]}"),
    ),
    "parts": (
        "/v1/chat/completions",
        "messages.0.content",
        _filled('{"model":"tiny","messages":[{"role":"user","content":[', "0", "]}]}"),
    ),
    "calls": (
        "/v1/chat/completions",
        "messages.0.tool_calls.0",
        _filled('{"model":"tiny","messages":[{"role":"assistant","tool_calls":[', "0", "]}]}"),
    ),
    "tools": ("/v1/chat/completions", "tools", _filled('{"model":"tiny","messages":[],"tools":[', "0", "]}")),
    "stop": ("/v1/completions", "stop", _filled('{"model":"tiny","prompt":"x","stop":[', "0", "]}")),
    "logit_bias": ("/v1/completions", "logit_bias", _fields('{"model":"tiny","prompt":"x","logit_bias":{', "}}")),
    "unknown fields": ("/v1/completions", "0", _fields('{"model":"tiny","prompt":"x",', "}")),
    "inner fields": (
        "/v1/chat/completions",
        "messages.0.0",
        _fields('{"model":"tiny","messages":[{"role":"user",', "}]}"),
    ),
    "input": ("/v1/responses", "input", _filled('{"model":"tiny","input":[', "0", "]}")),
    "tokens": ("/detokenize", "tokens.1", _filled('{"tokens":[1,', "{}", "]}")),
    "lists of tokens": ("/detokenize", "tokens", _filled('{"tokens":[', "{}", "]}")),
    "warm": ("/v1/cache/warm", "messages", _filled('{"messages":[', "0", "]}")),
}


@pytest.fixture(scope="module")
def any_number(start_server: Callable[..., Running], keyed: Running) -> Running:
    """A server that takes bodies of any number of values."""
    keys, limits = Keys([KEY], admin_key=ADMIN_KEY), Limits(max_json_values=10**7, max_json_containers=10**7)
    return start_server(keyed.engine, runner=keyed.runner, keys=keys, limits=limits)


@pytest.mark.parametrize("name", _WRONG)
def test_a_large_body_of_wrong_entries_is_refused_at_once(any_number: Running, name: str) -> None:
    keyed = any_number
    path, param, body = _WRONG[name]
    got: list[Any] = []

    def post() -> None:
        with keyed.http(ADMIN_KEY) as http:
            got.append(http.post(path, content=body, headers={"Content-Type": "application/json"}))

    before = time.process_time()
    asking = threading.Thread(target=post)
    asking.start()
    with keyed.http() as http:
        while asking.is_alive():
            assert http.get("/health").status_code == 200
            asking.join(0.02)
    took = time.process_time() - before
    assert got[0].status_code == 400
    assert got[0].json()["error"]["param"].startswith(param)
    assert len(got[0].content) < 1000
    # A quiet machine takes half a second, with parsing the JSON and the client's own work; a busy one took two. Where
    # each entry is told of, it takes minutes.
    assert took < 5.0


@pytest.mark.parametrize("body", [b"[" + b"[]," * 1_390_000 + b"[]]", b"[" * 4_000_000], ids=["many", "deep"])
def test_a_body_of_millions_of_values_is_not_parsed(
    keyed: Running, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("kvboost.serve.security.bodies.parse", fail)
    answer = ask(
        keyed.app, "POST", "/v1/completions", key=KEY, content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "too_many_values"


def test_a_body_of_many_lists_and_objects_is_not_parsed(keyed: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a message, a part or a call: 90,000 parts took the event loop a second."""

    def fail(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("kvboost.serve.security.bodies.parse", fail)
    lists = b"[" + b"[], " * 20_000 + b"[]]"
    answer = ask(keyed.app, "POST", "/v1/completions", key=KEY, content=lists)
    assert answer.json()["error"]["code"] == "too_many_containers"
    parts = [{"type": "text", "text": "{" * 9}] * 9000
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
    answer = ask(keyed.app, "POST", "/v1/chat/completions", key=KEY, json=body)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "too_many_containers"
    monkeypatch.undo()
    body["messages"][0]["content"] = "{" * 90_000
    answer = ask(keyed.app, "POST", "/v1/chat/completions", key=KEY, json=body)
    assert answer.json()["error"]["code"] == "context_length_exceeded", "braces in a text are no objects"


@pytest.mark.parametrize(
    "broken", ['{"model": "tiny",', '{"model": "tiny"} x', "[" * 3000, '{"prompt": 1}', "[1]", '"x"']
)
def test_a_large_body_is_refused_in_the_words_of_a_small_one(keyed: Running, broken: str) -> None:
    headers = {"Content-Type": "application/json"}
    space = " " * 100_000  # of no meaning in front of JSON
    small, large = (
        ask(keyed.app, "POST", "/v1/completions", key=KEY, content=before + broken, headers=headers)
        for before in ("", space)
    )
    assert (small.status_code, large.status_code) == (400, 400)
    assert _without_places(small) == _without_places(large)


def _without_places(answer: Any) -> str:
    return re.sub(r"\d+", "N", answer.text)


def test_large_bodies_wait_for_their_turn_and_leave_with_their_client(keyed: Running) -> None:
    go, begun = threading.Event(), threading.Event()

    async def blocked() -> None:
        await keyed.service.reading.run("another", lambda: (begun.set(), go.wait(30)))

    blocking = threading.Thread(target=lambda: asyncio.run(blocked()))
    blocking.start()
    try:
        assert begun.wait(10)
        body = json.dumps({"model": "tiny", "prompt": "x" * 100_000}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", keyed.port)) as connection:
            connection.sendall(head.encode() + body)
            assert _until(lambda: keyed.service.reading.waiting == 1)
            assert keyed.service.under_way.total() == 1
        assert _until(lambda: keyed.service.reading.waiting == 0)
        assert _until(lambda: keyed.service.under_way.total() == 0)
    finally:
        go.set()
        blocking.join()


def _until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.005)
    return met


def test_a_body_that_is_no_utf_8_is_not_parsed(keyed: Running) -> None:
    """Bytes of other encodings look like quotes, and hide the values behind them."""
    headers = {"Content-Type": "application/json"}
    for encoding in ("utf-16", "utf-16-le", "utf-32-be"):
        body = ('{"a":"\u2200","b":[' + "[]," * 100_000 + "[]]}").encode(encoding)
        answer = ask(keyed.app, "POST", "/v1/completions", key=KEY, content=body, headers=headers)
        assert answer.status_code == 400
        assert "it is no UTF-8; send a JSON object in UTF-8" in answer.json()["error"]["message"]


@pytest.mark.parametrize("counts", [[9000], [5000, 5000]])
def test_arguments_of_many_lists_are_not_parsed(keyed: Running, counts: list[int]) -> None:
    """They are JSON in a string, which the count of the body does not see."""
    texts = ['{"a":[' + "[]," * count + "[]]}" for count in counts]
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": text}} for text in texts]
    chat = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    items = {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": text} for text in texts]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/responses", items)):
        answer = ask(keyed.app, "POST", path, key=KEY, json={"model": "tiny", **body})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_containers")
        assert answer.json()["error"]["param"] in body


def test_what_clients_send_is_few_lists_and_objects(keyed: Running) -> None:
    """A long chat with parts, calls and tools, and the lists that the page asks the texts of."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [{"b": 1}]}'}}
    part = {"type": "text", "text": "x" * 30, "cache_control": {"type": "ephemeral"}}
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    schema = {"type": "object", "properties": {name: {"enum": [name]} for name in "abcd"}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(128)]
    body = {"model": "tiny", "messages": turns * 500, "tools": tools, "tool_choice": "none"}
    answer = ask(keyed.app, "POST", "/v1/chat/completions", key=KEY, json=body)
    assert answer.json()["error"]["code"] == "context_length_exceeded", "it was read"
    body = {"tokens": [[65] * 40] * 1024}
    answer = ask(keyed.app, "POST", "/detokenize", key=KEY, json=body)
    assert answer.json() == {"prompt": ["_" * 40] * 1024}


def test_long_texts_and_many_tokens_are_few_values(keyed: Running) -> None:
    text = 'a, b [c] {d} \\ "e", ' * 2000
    for body in ({"prompt": text, "max_tokens": 1}, {"prompt": [3] * 40_000, "max_tokens": 1}):
        answer = ask(keyed.app, "POST", "/v1/completions", key=KEY, json={"model": "tiny", **body})
        assert answer.json()["error"]["code"] == "context_length_exceeded", "it was read"


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"a": [1, 2, {"b": "x,y[z]{"}]},
        ['"', '\\"', '\\\\"', "\\", "\\\\", '",[{', ""],
        ["\\" * 7 + '"', '"' * 5, "a\\"],
    ],
)
def test_values_are_counted_outside_of_strings(value: Any) -> None:
    def marks(value: Any) -> int:
        if not isinstance(value, list | dict):
            return 0
        inner = list(value.values()) if isinstance(value, dict) else value
        return 1 + max(0, len(inner) - 1) + sum(map(marks, inner))

    text = json.dumps(value).encode()
    count = marks(value)
    assert not has_more(text, VALUES, count)
    assert has_more(text, VALUES, count - 1)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def outcome(parser: Any, body: bytes) -> Any:
    try:
        return "value", repr(parser(body))
    except (ValueError, RecursionError) as error:
        return type(error), str(error)


@settings(max_examples=200, deadline=None)
@given(_VALUES, st.booleans())
def test_values_are_those_of_pythons_parser(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert outcome(parse, body) == outcome(json.loads, body)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | st.text(alphabet='[]{}",:0123456789.eE+-truefalsn \\u\n', max_size=40).map(str.encode))
@example(b"1" * 5000)
@example(b"[" * 5000)
@example(b'"\\ud800"')
@example(b"\xef\xbb\xbf[1]")
@example(b"1e400")
@example(b"-0")
@example(b"NaN")
@example(b"[1,]")
@example(b'{"a":1,"a":2}')
def test_what_is_broken_is_refused_in_the_same_words(body: bytes) -> None:
    assert outcome(parse, body) == outcome(json.loads, body)


def test_numbers_are_as_exact() -> None:
    for text in ("0.1", "1e-7", "123456789012345678901234567890", "2.2250738585072014e-308", "1.7976931348623157e308"):
        assert parse(text.encode()) == json.loads(text)
    assert math.isnan(parse(b"NaN"))
    with pytest.raises(json.JSONDecodeError):
        parse(b"{")


def messages(*kinds: str) -> Callable[[], Awaitable[dict[str, Any]]]:
    """A connection that sends these and is silent then."""
    left = list(kinds)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.sleep(60)
        return {"type": left.pop(0)}

    return receive


def test_only_a_disconnect_is_the_end() -> None:
    async def wait() -> None:
        receive = messages("http.request", "http.request", "http.disconnect", "left")
        await asyncio.wait_for(disconnected(receive), 10)
        assert (await receive())["type"] == "left"

    asyncio.run(wait())


def test_work_is_cancelled_when_the_client_goes_and_not_before() -> None:
    ended: list[str] = []

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return "done"

    async def run() -> None:
        assert await while_connected(messages("http.request"), work(0.01)) == "done"
        assert ended == []
        with pytest.raises(ClientGoneError):
            await while_connected(messages("http.request", "http.disconnect"), work(60))
        assert ended == ["cancelled"], "before it returned"

    asyncio.run(run())


def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(while_connected(messages(), work()))
