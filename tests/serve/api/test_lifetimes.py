"""Lifetimes that clients ask for: text held this way outlives traffic that evicts other text, within a quota."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvboost import KVBoost
from kvboost.engine import pinning
from kvboost.hf.sampling import Sampling
from kvboost.serve.generation import holding
from kvboost.serve.generation.prompts import Hold
from kvboost.serve.generation.requests import GenerationRequest
from kvboost.serve.security.auth import Caller, Keys
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer
from tests.serve.conftest import ADMIN_KEY, KEY, SECRET, Running

_TOKENS = 2000  # that the store holds
_LENGTH = 290
_WORDS = ("contract", "binds", "both", "parties", "who", "have", "signed", "every", "page", "before", "a", "witness")
_seeds = count()
_QUESTION = {"role": "user", "content": "So?"}
_Ask = tuple[str, dict[str, Any]]


def _new_text() -> str:
    """One that no test has used: stores remember what came back to them."""
    return " ".join(Random(next(_seeds)).choices(_WORDS, k=200))[:_LENGTH]


def _messages(text: str, **mark: Any) -> _Ask:
    block = {"type": "text", "text": text, **({"cache_control": {"type": "ephemeral", **mark}} if mark else {})}
    return "/v1/messages", {"max_tokens": 2, "system": [block], "messages": [_QUESTION]}


def _chat(text: str, **fields: Any) -> _Ask:
    messages = [{"role": "system", "content": text}, _QUESTION]
    return "/v1/chat/completions", {"max_tokens": 2, "messages": messages, **fields}


def _response(text: str, **fields: Any) -> _Ask:
    return "/v1/responses", {"max_output_tokens": 2, "instructions": text, "input": "So?", **fields}


_SHAPES: list[tuple[Callable[..., _Ask], dict[str, Any], int]] = [
    (_messages, {"ttl": "5m"}, 300),
    (_messages, {"ttl": None}, 300),
    (_messages, {"ttl": "1h"}, 3600),
    (_chat, {"prompt_cache_retention": "24h"}, 86400),
    (_chat, {"prompt_cache_retention": "24h", "prompt_cache_key": "contract"}, 86400),
    (_response, {"prompt_cache_retention": "24h"}, 86400),
]


def _read(http: httpx.Client, asked: _Ask) -> int:
    """How much of a prompt was found."""
    answer = http.post(asked[0], json={"model": "tiny", **asked[1]})
    assert answer.status_code == 200, answer.text
    assert "x-kvboost-ignored" not in answer.headers
    usage = answer.json()["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])


def _traffic(http: httpx.Client, *, words: int = 60, times: int = 1) -> None:
    for number in range(40):
        for _ in range(times):
            json = {"model": "tiny", "prompt": f"{number} " * words, "max_tokens": 1}
            assert http.post("/v1/completions", json=json).status_code == 200


def _counted(running: Running) -> tuple[float, float]:
    running.service.client_pins._pool.start("", lambda: None).result(30)
    families = {one.name: one for one in text_string_to_metric_families(running.service.metrics.text().decode())}
    found = {s.labels["outcome"]: s.value for s in families["kvboost_client_pins"].samples if s.name.endswith("_total")}
    return found["held"], found["failed"]


def _outcomes(running: Running) -> tuple[float, float]:
    """Lifetimes that were given in this test, and those that were not, once all are decided."""
    held, failed = _counted(running)
    before = running.app.state.counted_before
    return held - before[0], failed - before[1]


@pytest.fixture(scope="module")
def cache_bytes(make_engine: Callable[..., KVBoost]) -> int:
    with make_engine() as engine:
        return _TOKENS * engine.parts.assembly.facts.layout.bytes_per_token  # type: ignore[union-attr]


@pytest.fixture
def server(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost], cache_bytes: int) -> Running:
    return start_server(make_engine(cache_bytes=cache_bytes))


@pytest.fixture
def running(server: Running) -> Running:
    server.engine.clear()
    server.app.state.counted_before = _counted(server)
    return server


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with running.http(None) as made:
        yield made


@pytest.mark.parametrize(("ask", "lifetime", "seconds"), _SHAPES, ids=str)
def test_held_text_outlives_other_traffic(
    running: Running, http: httpx.Client, ask: Callable[..., _Ask], lifetime: dict[str, Any], seconds: int
) -> None:
    text = _new_text()
    _read(http, ask(text))
    _traffic(http)
    assert _read(http, ask(text)) < _LENGTH / 2, "the store is too large to show anything"
    _read(http, ask(text, **lifetime))
    assert _outcomes(running) == (1, 0)
    (pin,) = running.engine.pins.listed()
    assert (pin.seconds, pin.client) == (seconds, True)
    assert pin.tokens >= _LENGTH
    assert pin.name == lifetime.get("prompt_cache_key", pin.name)
    _traffic(http)
    assert _read(http, ask(text)) >= _LENGTH
    _read(http, ask(text, **lifetime))
    assert _outcomes(running) == (2, 0)
    (newer,) = running.engine.pins.listed()
    assert (newer.name, newer.id == pin.id) == (pin.name, False), "the next request with the same beginning renews it"


def test_without_a_lifetime_nothing_is_held(running: Running, http: httpx.Client) -> None:
    for retention in ("in_memory", "in-memory", None):
        _read(http, _chat(_new_text(), prompt_cache_retention=retention, prompt_cache_key="contract"))
    assert _outcomes(running) == (0, 0)
    asked = _chat(_new_text(), prompt_cache_retention="a week")[1]
    assert http.post("/v1/chat/completions", json={"model": "tiny", **asked}).status_code == 400


def test_after_its_time_it_goes_with_the_next_request(
    running: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 1000.0)
    monkeypatch.setattr(pinning, "time", clock)
    text = _new_text()
    _read(http, _messages(text, ttl="5m"))
    assert _outcomes(running) == (1, 0)
    clock.monotonic = lambda: 1299.0
    _traffic(http)
    assert running.engine._store.stats().leased > 0
    clock.monotonic = lambda: 1300.0
    _traffic(http)
    assert running.engine._store.stats().leased == 0
    assert _read(http, _messages(text)) < _LENGTH / 2


def test_two_lifetimes_in_one_prompt(running: Running, http: httpx.Client) -> None:
    text = _new_text()[:120]
    path, asked = _messages(text, ttl="1h")
    said = {"type": "text", "text": "And a letter. " * 5, "cache_control": {"type": "ephemeral"}}
    asked["messages"] = [{"role": "user", "content": [said, {"type": "text", "text": "So?"}]}]
    usage = http.post(path, json={"model": "tiny", **asked}).json()["usage"]
    assert _outcomes(running) == (2, 0)
    held = {pin.seconds: pin.tokens for pin in running.engine.pins.listed()}
    assert held == {3600: len("<system>" + text), 300: usage["cache_creation_input_tokens"]}
    assert usage["cache_creation"] == {
        "ephemeral_1h_input_tokens": held[3600],
        "ephemeral_5m_input_tokens": held[300] - held[3600],
    }


def test_over_its_quota_a_client_loses_its_oldest_and_no_request_fails(
    running: Running, http: httpx.Client, cache_bytes: int
) -> None:
    texts = [_new_text()[:200] for _ in range(6)]
    for text in texts:
        _read(http, _messages(text, ttl="1h"))
    assert _outcomes(running) == (6, 0)
    pins = running.engine.pins.listed()
    assert 1 < len(pins) < 6
    assert cache_bytes / 8 < sum(pin.nbytes for pin in pins) <= cache_bytes / 4
    _traffic(http)
    assert _read(http, _messages(texts[-1])) >= 200
    assert _read(http, _messages(texts[0])) < 100
    _read(http, _messages(_new_text() * 3, ttl="1h"))
    assert _outcomes(running) == (6, 1)
    assert running.engine.pins.listed() == pins, "what cannot be held takes nobody's place"


def test_what_fails_while_it_is_held_is_counted_and_the_answer_is_whole(
    running: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a tier broke")

    monkeypatch.setattr(running.engine.pins, "add", broken)
    _read(http, _messages(_new_text(), ttl="1h"))
    assert _outcomes(running) == (0, 1)


def test_a_forward_and_a_pin_do_not_wait_for_each_other(running: Running, http: httpx.Client) -> None:
    text = _new_text()
    _read(http, _messages(text))
    with running.engine.parts.running():  # as in a step
        _read(http, _messages(text, ttl="5m"))
        assert _outcomes(running) == (1, 0)


def test_what_waits_too_long_or_holds_too_little_is_counted_as_failed(
    running: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = running.engine.pins.add
    monkeypatch.setattr(running.engine.pins, "add", lambda *args, **given: replace(add(*args, **given), tokens=16))
    _read(http, _messages(_new_text(), ttl="1h"))
    assert _outcomes(running) == (0, 1)
    monkeypatch.setattr(holding, "_MAX_WAITING", 0)
    _read(http, _messages(_new_text(), ttl="1h"))
    assert _outcomes(running) == (0, 2)


def test_the_states_of_recurrent_layers_are_held(start_server: Callable[..., Running]) -> None:
    model = tiny_model("qwen3_5_text", vocab_size=260, max_position_embeddings=2048)
    running = start_server(KVBoost(model, byte_tokenizer(), chunk_size=16, cache_bytes=200_000, quality="exact"))
    running.app.state.counted_before, text = (0, 0), _new_text()
    with running.http(None) as http:
        _read(http, _messages(text))
        _traffic(http, words=100, times=2)
        assert _read(http, _messages(text)) == 0, "the store is too large to show anything"
        _read(http, _messages(text, ttl="5m"))
        assert _outcomes(running) == (1, 0)
        _traffic(http, words=100, times=2)
        assert _read(http, _messages(text)) >= 256


def test_a_tenant_that_was_released_holds_nothing(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    running = start_server(make_engine(), keys=Keys([KEY], admin_key=ADMIN_KEY, secret=SECRET))
    running.app.state.counted_before, text = (0, 0), _new_text()
    ids = running.engine.encode(text)
    caller, holds = Caller("gone", admin=False), (Hold(len(ids), 60),)
    asked = GenerationRequest("chat", [(ids, ())], caller, 1, Sampling(), model=None, holds=holds)
    view = running.engine.for_tenant("gone")
    view.warm(ids)
    running.service.client_pins.start(asked, adapter=None)
    assert _outcomes(running) == (1, 0)
    view.close()
    running.service.client_pins.start(asked, adapter=None)
    assert _outcomes(running) == (1, 0)
    assert running.engine.pins.listed() == []
    assert "gone" not in {view.config.tenant for view in running.engine.views()}
