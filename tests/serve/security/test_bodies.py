from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.serve.conftest import ADMIN_KEY, Running

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
    "tokens": ("/detokenize", "tokens.0", _filled('{"tokens":[', "{}", "]}")),
    "warm": ("/v1/cache/warm", "messages", _filled('{"messages":[', "0", "]}")),
}


@pytest.mark.parametrize("name", _WRONG)
def test_a_large_body_of_wrong_entries_is_refused_at_once(keyed: Running, name: str) -> None:
    path, param, body = _WRONG[name]
    got: list[Any] = []

    def ask() -> None:
        with keyed.http(ADMIN_KEY) as http:
            got.append(http.post(path, content=body, headers={"Content-Type": "application/json"}))

    before = time.process_time()
    asking = threading.Thread(target=ask)
    asking.start()
    with keyed.http() as http:
        while asking.is_alive():
            assert http.get("/health").status_code == 200
            asking.join(0.02)
    took = time.process_time() - before
    assert got[0].status_code == 400
    assert got[0].json()["error"]["param"].startswith(param)
    assert len(got[0].content) < 1000
    assert took < 1.0, "parsing the JSON and the client's own work count as well"
