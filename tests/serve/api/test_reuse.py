"""What clients are told of reuse, where a part of the reused tokens was recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvboost import KVBoost
from tests.serve.conftest import Running

_PASSAGES = [
    f"Passage {n} says that {n * n} cats and {n + 7} dogs have read {n + 1} books about stores of keys and values."
    for n in range(6)
]


@pytest.fixture(scope="module")
def http(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Iterator[httpx.Client]:
    engine = make_engine(quality="high", recompute_ratio=0.5, force_approx=True)
    engine.add_documents(_PASSAGES, progress=False)
    with start_server(engine).http(None) as client:
        yield client


def _sources(http: httpx.Client) -> dict[str, float]:
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    samples = families["kvboost_prompt_tokens"].samples
    return {sample.labels["source"]: sample.value for sample in samples if sample.name.endswith("_total")}


def _post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={"model": "tiny", "max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def test_recomputed_tokens_are_nowhere_counted_as_cached(http: httpx.Client) -> None:
    before = _sources(http)
    text = f"Well: {_PASSAGES[4]} {_PASSAGES[1]} So?"
    chat = _post(http, "/v1/chat/completions", messages=[{"role": "user", "content": text}])
    message = _post(http, "/v1/messages", messages=[{"role": "user", "content": f"And: {text}"}])
    prompts = 0
    for usage, read, prompt in (
        (chat, chat["prompt_tokens_details"]["cached_tokens"], chat["prompt_tokens"]),
        (message, message["cache_read_input_tokens"], message["input_tokens"] + message["cache_read_input_tokens"]),
    ):
        reuse = usage["kvboost"]
        assert reuse["moved_tokens"] > reuse["recomputed_tokens"] > 0
        assert read == reuse["cached_tokens"] == prompt - reuse["recomputed_tokens"] - reuse["fresh_tokens"]
        prompts += prompt
    now = {source: tokens - before[source] for source, tokens in _sources(http).items()}
    assert sum(now.values()) == prompts, "each token of a prompt counts once"
    assert now["recomputed"] == chat["kvboost"]["recomputed_tokens"] + message["kvboost"]["recomputed_tokens"]
