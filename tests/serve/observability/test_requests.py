from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.cli.main import main
from kvboost.failures import log_failure
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve import Keys
from kvboost.serve.app import make_app
from kvboost.serve.observability import requests
from kvboost.serve.observability.requests import CutOffError, RequestLog
from kvboost.serve.security.auth import tenant_of
from kvboost.types import tenant_digest
from tests.serve.asgi import ask
from tests.serve.conftest import ADMIN_KEY, KEY, SECRET, Running

_SECRET = "the moon is made of cheese"


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kvboost.serve"]


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvboost.serve")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_is_one_line_of_numbers(keyed: Running, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    app = make_app(keyed.engine, keyed.runner, model_name="tiny", keys=Keys([KEY], secret=SECRET))
    asked = {"model": "tiny", "prompt": _SECRET * 4, "max_tokens": 3, "temperature": 0, "stream": stream}
    for _ in range(2):
        answer = ask(app, "POST", "/v1/completions", key=KEY, json=asked, headers={"X-Request-ID": "abc-1.2"})
        assert answer.headers["x-request-id"] == "abc-1.2"
    line = _lines(caplog)[-1]
    assert len(_lines(caplog)) == 2
    prefix = (
        f"POST /v1/completions status=200 request=abc-1.2 tenant={tenant_digest(tenant_of(KEY, SECRET)).hex()[:8]} ms="
    )
    assert line.startswith(prefix)
    told = dict(word.split("=") for word in line.split()[2:])
    assert int(told["prompt"]) == len(_SECRET) * 4
    assert int(told["exact"]) > 0, "the second request found the first one's KV"
    assert told["new"] == "3"
    assert float(told["ttft_ms"]) > 0
    assert told["finish"] == "length"
    assert "moon" not in caplog.text
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "given",
    ["", "x" * 129, "two words", "line\tbreak", "ümlaut", "a,b"],
    ids=["empty", "long", "space", "tab", "no ascii", "comma"],
)
def test_an_id_that_is_not_plain_is_replaced(keyed: Running, caplog: pytest.LogCaptureFixture, given: str) -> None:
    answer = ask(keyed.app, "GET", "/v1/models", key=KEY, headers={"x-request-id": given.encode("latin-1")})
    assert re.fullmatch(r"req-[0-9a-f]{24}", answer.headers["x-request-id"])
    assert answer.headers["x-request-id"] in _lines(caplog)[-1]


def test_refusals_have_an_id_and_a_line_without_the_clients_words(
    keyed: Running, caplog: pytest.LogCaptureFixture
) -> None:
    for method, path in (("GET", f"/v1/{_SECRET}"), ("GET", f"/v1/models/{_SECRET}"), ("MOON", "/v1/models")):
        answer = ask(keyed.app, method, path, key=KEY)
        assert answer.status_code in (404, 405)
        assert answer.headers["x-request-id"].startswith("req-")
    ask(keyed.app, "GET", "/v1/models", key=_SECRET.replace(" ", ""))
    assert [line.partition(" status=")[0] for line in _lines(caplog)] == [
        "GET -",
        "GET /v1/models/{model:path}",
        "- /v1/models",
        "GET /v1/models",
    ]
    assert "status=401" in caplog.text
    assert "moon" not in caplog.text.lower()


def test_probes_are_not_logged(keyed: Running, caplog: pytest.LogCaptureFixture) -> None:
    assert "x-request-id" in ask(keyed.app, "GET", "/health").headers
    assert _lines(caplog) == []


def test_a_failure_is_answered_counted_and_logged_with_its_id(
    keyed: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str | None) -> None:
        raise KeyError(_SECRET)

    monkeypatch.setattr(keyed.service, "check_model", fail)
    answer = ask(keyed.app, "GET", "/v1/models/tiny", key=KEY, headers={"x-request-id": "the-one"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"] == "the-one"
    failed, line = _lines(caplog)
    assert failed.startswith("request=the-one failed: KeyError at observability/test_requests.py:")
    assert " in fail < api/status.py:" in failed
    assert "moon" not in caplog.text, "what it says may be a client's"
    assert "status=500 request=the-one" in line
    assert b'kvboost_http_responses_total{status="500"}' in keyed.service.metrics.text()


def test_what_fails_behind_the_headers_tells_the_web_server_nothing(
    keyed: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async def begun_and_failed(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError(_SECRET)

    with pytest.raises(CutOffError) as told:
        ask(
            RequestLog(begun_and_failed, metrics=keyed.service.metrics), "GET", "/", headers={"x-request-id": "the-one"}
        )
    assert "moon" not in "".join(traceback.format_exception(told.value)) + caplog.text
    assert "request=the-one failed: KeyError at" in caplog.text


def test_a_message_is_logged_where_everything_is(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("kvboost.serve")
    try:
        try:
            raise KeyError(_SECRET)
        except KeyError as error:
            raise RuntimeError(_SECRET) from error
    except RuntimeError as error:
        log_failure(log, error, "it failed")
        assert "it failed: RuntimeError at observability/" in caplog.text
        assert ", from KeyError at observability/" in caplog.text
        assert "moon" not in caplog.text
        with caplog.at_level(logging.DEBUG, logger="kvboost.serve"):
            log_failure(log, error, "it failed")
        assert "moon" in caplog.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_job_that_fails_is_logged_without_its_message(
    keyed: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError(_SECRET)

    monkeypatch.setattr(keyed.service.chats, "decode", fail)
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 3, "stream": stream}
    with keyed.http() as http:
        answer = http.post("/v1/completions", json=asked)
    assert "its log says why" in answer.text or "the server's log says why" in answer.text
    assert "an answer could not be read: ValueError at observability/test_requests.py:" in caplog.text
    assert "failed in its job" in caplog.text
    assert "moon" not in caplog.text


def test_tenants_and_models_are_called_as_kvboost_cache_calls_them(
    make_engine: Callable[..., KVBoost], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    engine = make_engine(disk_cache_dir=tmp_path / "kv")
    keys = Keys([KEY], admin_key=ADMIN_KEY, secret=SECRET)
    with engine, BatchRunner(engine) as runner:
        app = make_app(engine, runner, model_name="tiny", keys=keys)
        asked = {"model": "tiny", "prompt": _SECRET * 4, "max_tokens": 1}
        assert ask(app, "POST", "/v1/completions", key=KEY, json=asked).status_code == 200
        spaces = ask(app, "GET", "/v1/cache", key=ADMIN_KEY).json()["spaces"]
        app.state.service.close()
        engine.flush()
    assert main(["cache", "stat", str(tmp_path / "kv"), "--json"]) == 0
    [stored] = json.loads(capsys.readouterr().out)["spaces"]
    [told] = [space for space in spaces if space["tenant"] == keys.tenants[0]]
    assert (told["id"], told["model"]) == (stored["tenant"][:8], stored["model"][:12])
    assert f" tenant={told['id']} " in caplog.text
    assert main(["cache", "stat", str(tmp_path / "kv")]) == 0
    shown = capsys.readouterr().out
    assert told["id"] in shown
    assert told["model"] in shown


def test_lines_about_nobody_known_are_bounded_and_no_others(
    make_engine: Callable[..., KVBoost], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("kvboost.serve.observability.requests.time", SimpleNamespace(monotonic=lambda: now))
    with make_engine() as engine, BatchRunner(engine) as runner:
        app = make_app(engine, runner, model_name="tiny", keys=Keys([KEY], secret=SECRET))
        for _ in range(70):
            assert ask(app, "GET", "/v1/models", key="a wrong key").status_code == 401
        assert sum("status=401" in line for line in _lines(caplog)) == 60
        for _ in range(70):
            assert ask(app, "GET", "/metrics", key=KEY).status_code == 403
            ask(app, "GET", "/v1/models", key=KEY)
        assert sum("status=200" in line for line in _lines(caplog)) == 70
        now += 60
        ask(app, "GET", "/health")
        assert _lines(caplog)[-1].startswith("10 requests without a valid key are left out here")
        ask(app, "GET", "/v1/models")
        assert "status=401" in _lines(caplog)[-1], "a new minute"
        app.state.service.close()


def test_pages_of_other_sites_count_as_nobody_known(keyed: Running, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(keyed.engine, keyed.runner, model_name="tiny")
    for _ in range(70):
        foreign = {"Origin": "https://attacker.example", "Sec-Fetch-Site": "cross-site"}
        assert ask(app, "GET", "/v1/models", headers=foreign).status_code == 403
    assert len(_lines(caplog)) == 60


def test_the_model_of_a_tenant_is_looked_at_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def namespace() -> bytes:
        nonlocal looks
        looks += 1
        return bytes([looks]) * 32

    keys = SimpleNamespace(keys=SimpleNamespace(namespace=namespace))
    view = SimpleNamespace(config=SimpleNamespace(tenant="t"), session=SimpleNamespace(prefiller=keys))
    engine: Any = SimpleNamespace(views=lambda: [view])
    listed = requests.Spaces(engine).listed
    assert [listed()[0]["model"] for _ in range(3)] == ["01" * 6] * 3
    monkeypatch.setattr(requests, "_MODEL_S", 0.0)
    assert listed()[0]["model"] == "02" * 6, "the model was changed meanwhile"
