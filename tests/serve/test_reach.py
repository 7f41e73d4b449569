"""From where a server is reached: other sites' pages, TLS, a proxy's path."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvboost import ConfigError, KVBoost
from kvboost.serve import Keys, ServerConfig
from kvboost.serve.app import make_app
from kvboost.serve.run import check_reach
from tests.helpers.certificates import self_signed
from tests.serve.asgi import ask
from tests.serve.conftest import KEY, Running

_ORIGIN = "https://app.example"
_FOREIGN = {"Origin": "https://attacker.example", "Sec-Fetch-Site": "cross-site"}
_PAGE = {"Origin": _ORIGIN, "Sec-Fetch-Site": "cross-site"}
_PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}


@pytest.mark.parametrize("keys", [None, Keys([KEY])], ids=["open", "keys"])
def test_pages_of_a_named_origin_may_call_and_others_may_not(keyed: Running, keys: Keys | None) -> None:
    app = make_app(keyed.engine, keyed.runner, model_name="tiny", keys=keys, origins=[_ORIGIN])
    asked: dict[str, Any] = {"json": {"prompt": "x"}, "key": KEY}
    first = ask(app, "OPTIONS", "/v1/chat/completions", headers={**_PAGE, **_PREFLIGHT})
    assert first.status_code == 200
    assert first.headers["access-control-allow-origin"] == _ORIGIN
    assert "x-stainless-os" in first.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in first.headers
    answer = ask(app, "POST", "/tokenize", headers=_PAGE, **asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == _ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    foreign = ask(app, "POST", "/tokenize", headers=_FOREIGN, **asked)
    assert foreign.status_code == (200 if keys else 403)
    assert "access-control-allow-origin" not in foreign.headers
    assert ask(app, "OPTIONS", "/tokenize", headers={**_FOREIGN, **_PREFLIGHT}).status_code == 400


def test_without_an_origin_nobody_gets_leave(keyed: Running) -> None:
    app = make_app(keyed.engine, keyed.runner, model_name="tiny", keys=Keys([KEY]))
    assert ask(app, "OPTIONS", "/v1/chat/completions", headers={**_PAGE, **_PREFLIGHT}).status_code == 401


@pytest.mark.parametrize("prefix", ["/llm", ""], ids=["handed on", "taken off"])
def test_a_proxy_may_show_it_under_a_path(keyed: Running, prefix: str) -> None:
    app = make_app(keyed.engine, keyed.runner, model_name="tiny", keys=Keys([KEY]), root_path="/llm")
    assert ask(app, "GET", f"{prefix}/v1/models").status_code == 401
    assert ask(app, "GET", f"{prefix}/v1/models", key=KEY).json()["data"][0]["id"] == "tiny"
    assert ask(app, "GET", f"{prefix}/v1/models/tiny", key=KEY).status_code == 200
    assert ask(app, "GET", f"{prefix}/").headers["content-type"].startswith("text/html")
    assert ask(app, "GET", f"{prefix}/openapi.json", key=KEY).json()["servers"] == [{"url": "/llm"}]
    assert ask(app, "GET", "/llmore/v1/models", key=KEY).status_code == 404


def test_a_root_path_over_routes_is_refused(keyed: Running) -> None:
    with pytest.raises(ConfigError, match="choose another path"):
        make_app(keyed.engine, keyed.runner, model_name="tiny", root_path="/v1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cors_origin": ("*",)}, "every web page"),
        ({"cors_origin": ("app.example",)}, "is no origin"),
        ({"cors_origin": ("https://app.example/",)}, "is no origin"),
        ({"tls_cert_file": "cert.pem"}, "give both"),
        ({"tls_cert_file": "absent.pem", "tls_key_file": "absent.pem"}, "PEM certificate"),
        ({"root_path": "llm"}, "is no path"),
        ({"root_path": "/llm/"}, "is no path"),
    ],
    ids=str,
)
def test_what_cannot_work_is_said(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_reach(ServerConfig(**settings), Keys())


def test_every_page_may_call_where_keys_are_needed() -> None:
    check_reach(ServerConfig(cors_origin=("*",)), Keys([KEY]))


def test_it_speaks_tls(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost], tmp_path: Path
) -> None:
    certificate, key = self_signed(tmp_path)
    check_reach(ServerConfig(tls_cert_file=certificate, tls_key_file=key), Keys())
    running = start_server(make_engine(), tls=(certificate, key))
    trusted = ssl.create_default_context(cafile=str(certificate))
    assert httpx.get(f"https://localhost:{running.port}/health", verify=trusted).json() == {"status": "ok"}
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://localhost:{running.port}/health")
