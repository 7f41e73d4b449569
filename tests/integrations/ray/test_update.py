"""A fleet whose weights are updated while it answers: no KV of the old weights is used for the new ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from safetensors.torch import load_file, save_file

from benchmarks.common.servers import redis_server
from tests.helpers.serving import kvboost_serve, tiny_folder
from tests.integrations.ray.conftest import until
from tests.integrations.ray.fleets import deploy, fleet, text

pytestmark = pytest.mark.usefixtures("cluster")
_PROMPTS = [text(500 + number) for number in range(4)]


def _answer(url: str, prompt: str) -> Any:
    asked = {"model": "model", "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1}
    response = httpx.post(f"{url}/v1/completions", json=asked, timeout=120)
    response.raise_for_status()
    (choice,) = response.json()["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def _plain(model: Path) -> list[Any]:
    with kvboost_serve(model) as server:
        return [_answer(server.url, prompt) for prompt in _PROMPTS]


def _other_weights(folder: Path) -> Path:
    file = tiny_folder(folder, num_hidden_layers=4) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 3
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _keep_asking(ask: Callable[[], None]) -> tuple[threading.Event, threading.Thread]:
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            ask()

    thread = threading.Thread(target=run)
    thread.start()
    return ended, thread


def test_an_update_to_other_weights_uses_nothing_of_the_old_ones(model: Path, tmp_path: Path) -> None:
    other = _other_weights(tmp_path / "other")
    old, new = _plain(model), _plain(other)
    assert all(one != two for one, two in zip(old, new, strict=True))
    with redis_server() as redis, Redis.from_url(redis.url) as client:
        engine = {"cache_bytes": 4 * 10**7, "remote_url": redis.url}
        with fleet(model, engine=engine) as running:
            seen: list[Any] = []
            before = [_answer(running.url, prompt) for prompt in _PROMPTS]
            assert before == old
            until(client.dbsize)
            ended, thread = _keep_asking(lambda: seen.append(_answer(running.url, _PROMPTS[0])))
            try:
                deploy(other, engine=engine)
                until(lambda: seen and seen[-1] == new[0])
            finally:
                ended.set()
                thread.join()
            assert [_answer(running.url, prompt) for prompt in _PROMPTS] == new
    assert all(answer in (old[0], new[0]) for answer in seen)
    assert old[0] in seen, "it was asked while the old weights still answered"
