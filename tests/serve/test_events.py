"""A real server tells real subscribers what it holds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("msgspec", reason="needs kvboost[fleet]")
pytest.importorskip("zmq", reason="needs kvboost[fleet]")

from benchmarks.common.servers import free_port
from examples.fleet.subscriber import EventSubscriber
from kvboost import ConfigError, KVBoost
from kvboost.fleet.events import StoreEvents
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve import ServerConfig, serve
from kvboost.serve.run import check_port
from tests.fleet.picture import Picture
from tests.fleet.test_subscribe import until
from tests.helpers.serving import key_files, kvboost_serve, tiny_folder
from tests.helpers.tokenizer import byte_tokenizer


def test_a_servers_events_say_what_it_holds(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    live, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    keys = key_files(tmp_path)
    options = ["--kv-events", live, "--kv-events-replay", replay, "--chunk-size", "16", *keys.options]
    options += ["--disk-cache-dir", str(tmp_path / "kv")]
    picture, losses = Picture(), list[str]()
    with (
        EventSubscriber(
            live, on_batch=lambda batch: picture.apply(batch.events), on_lost=losses.append, replay_endpoint=replay
        ),
        kvboost_serve(tiny_folder(tmp_path / "model"), options, admin_key=keys.admin) as server,
    ):
        prompt = "A long text about nothing in particular. " * 6
        for key in (keys.first, keys.second):  # two tenants: each has the text for itself
            headers = {"Authorization": f"Bearer {key}"}
            asked = {"model": "model", "prompt": prompt, "max_tokens": 2, "temperature": 0}
            httpx.post(server.url + "/v1/completions", json=asked, headers=headers, timeout=60).raise_for_status()
        told = server.cache()
        assert told["cache"]["hot_chunks"] >= 10
        until(lambda: len(picture.keys("memory")) == server.cache()["cache"]["hot_chunks"])
        until(lambda: picture.keys("disk") == picture.keys("memory"))
        decode = byte_tokenizer().decode
        texts = [decode(event.token_ids) for event in picture.held["memory"].values()]
        assert "".join(texts[: len(texts) // 2]) in prompt
        assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]
        assert losses == []
    assert server.code == 0


def test_without_the_option_nobody_listens(make_engine: Callable[..., KVBoost]) -> None:
    config = ServerConfig(served_model_name="tiny", port=0)
    with make_engine() as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvboost.serve.run.asyncio.run", lambda serving: serving.close())
        patch.setattr(KVBoost, "listen", None)
        with BatchRunner(engine) as runner:
            serve(engine, runner, config)


@pytest.mark.parametrize(("endpoint", "warns"), [("tcp://*:0", True), ("tcp://127.0.0.1:0", False)])
def test_whoever_lets_others_read_prompts_is_told(
    make_engine: Callable[..., KVBoost], caplog: pytest.LogCaptureFixture, endpoint: str, warns: bool
) -> None:
    def run(serving: Coroutine[Any, Any, None]) -> None:
        serving.close()

    with make_engine() as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvboost.serve.run.asyncio.run", run)
        with BatchRunner(engine) as runner, caplog.at_level(logging.WARNING):
            serve(engine, runner, ServerConfig(served_model_name="tiny", port=0, kv_events=endpoint))
    assert ("whoever can connect can read them" in caplog.text) is warns


def test_what_cannot_be_published_is_said_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be published on tcp://192.0.2.1"):
        check_port(ServerConfig(port=0, kv_events="tcp://*:0", kv_events_replay="tcp://192.0.2.1:1"))
    with pytest.raises(ConfigError, match="give kv_events, too"):
        ServerConfig(kv_events_topic="kv@one@model")
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "kvboost.fleet.publish")
    with pytest.raises(ConfigError, match=r'its extra fleet \(in a checkout: pip install "\.\[fleet\]"\)'):
        check_port(ServerConfig(port=0, kv_events="tcp://*:0"))


def test_an_engine_tells_of_all_its_tenants(make_engine: Callable[..., KVBoost]) -> None:
    picture = Picture()
    tokens = list(range(5, 200))
    with make_engine() as engine:
        engine.warm(tokens)
        engine.for_tenant("before").warm(tokens)
        engine.listen(StoreEvents(picture.apply))
        known = len(picture.keys("memory"))
        assert known == engine.cache_stats()["hot_chunks"] * 2 > 0
        engine.for_tenant("after").warm(tokens)
        assert len(picture.keys("memory")) == 3 * known // 2
        engine.for_tenant("before").clear()
        assert len(picture.keys("memory")) == known
    assert not picture.keys("memory")


def test_a_store_of_another_kind_is_refused(make_engine: Callable[..., KVBoost]) -> None:
    with make_engine() as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_store", object())
        with pytest.raises(ConfigError, match="use a MemoryStore or a TieredStore"):
            engine.listen(StoreEvents(lambda events: None))
