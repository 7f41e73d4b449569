from __future__ import annotations

import logging
import re

import pytest

from kvboost.serve import Keys
from kvboost.serve.app import make_app
from kvboost.serve.security.auth import tenant_of
from tests.serve.asgi import ask
from tests.serve.conftest import KEY, SECRET, Running

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
    prefix = f"POST /v1/completions status=200 request=abc-1.2 tenant={tenant_of(KEY, SECRET)[:8]} ms="
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
        raise KeyError("a bug")

    monkeypatch.setattr(keyed.service, "check_model", fail)
    answer = ask(keyed.app, "GET", "/v1/models/tiny", key=KEY, headers={"x-request-id": "the-one"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"] == "the-one"
    failed, line = _lines(caplog)
    assert failed == "request=the-one failed"
    assert "status=500 request=the-one" in line
    assert b'kvboost_http_responses_total{status="500"}' in keyed.service.metrics.text()
