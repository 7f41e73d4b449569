"""The gate alone, without a server behind it: what it lets through, and in which words it refuses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvboost.serve.security.auth import Access, Caller, Gate, Keys, tenant_named, tenant_of
from kvboost.serve.security.limits import Limits
from tests.serve.conftest import ADMIN_KEY, KEY

_ROUTES = {
    ("GET", "/health"): Access.OPEN,
    ("GET", "/v1/models/{model:path}"): Access.USER,
    ("POST", "/v1/things"): Access.USER,
    ("PUT", "/v1/things"): Access.USER,
    ("DELETE", "/v1/cache"): Access.ADMIN,
}
_KEYS = Keys([KEY], admin_key=ADMIN_KEY, secret=b"s" * 32)
_BEARER = {"authorization": f"Bearer {KEY}"}


class Asked:
    """One request and what became of it."""

    def __init__(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        *,
        keys: Keys = _KEYS,
        kind: str = "http",
        only_local_names: bool = True,
        origins: tuple[str, ...] = (),
        limits: Limits | None = None,
    ) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.scope: dict[str, Any] = {"type": kind, "method": method, "path": path, "headers": raw}
        self.passed: list[tuple[Any, ...]] = []
        self.sent: list[Any] = []

        async def app(*arguments: Any) -> None:
            self.passed.append(arguments)

        async def send(message: Any) -> None:
            self.sent.append(message)

        self.receive, self.send = object(), send
        gate = Gate(
            app,
            routes=_ROUTES,
            keys=keys,
            limits=limits or Limits(),
            only_local_names=only_local_names,
            origins=origins,
        )
        asyncio.run(gate(self.scope, self.receive, send))  # type: ignore[arg-type]
        assert not self.passed or self.passed == [(self.scope, self.receive, send)]

    @property
    def refusal(self) -> tuple[int, str, str, dict[bytes, bytes]]:
        """Status, code, message and the headers that are not in every answer."""
        assert not self.passed
        told = json.loads(self.sent[1]["body"])["error"]
        headers = {name: value for name, value in self.sent[0]["headers"] if not name.startswith(b"content-")}
        return self.sent[0]["status"], told["code"], told["message"], headers


def test_a_key_is_a_caller_and_the_route_is_noted() -> None:
    asked = Asked("GET", "/v1/models/a/b", _BEARER)
    assert asked.passed
    state = asked.scope["state"]
    assert state["route"] == "/v1/models/{model:path}"
    caller = state["caller"]
    assert (caller.tenant, caller.admin) == (tenant_of(KEY, b"s" * 32), False)
    assert len(caller.key_id) == 16
    assert Asked("DELETE", "/v1/cache", {"authorization": f"Bearer {ADMIN_KEY}"}).scope["state"]["caller"].admin


@pytest.mark.parametrize(
    "headers", [{"x-api-key": KEY}, {"authorization": f"bearer  {KEY} "}, {"authorization": f"BEARER {KEY}"}]
)
def test_a_key_may_be_written_so(headers: dict[str, str]) -> None:
    assert Asked("POST", "/v1/things", headers).passed


def test_a_key_in_the_wrong_header_does_not_make_up_for_a_wrong_one() -> None:
    assert not Asked("POST", "/v1/things", {"authorization": "Bearer wrong-key", "x-api-key": KEY}).passed


def test_refusals_say_what_to_do() -> None:
    assert Asked("POST", "/v1/things", {}).refusal == (
        401,
        "invalid_api_key",
        "give a valid key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        {b"www-authenticate": b"Bearer"},
    )
    assert Asked("DELETE", "/v1/cache", _BEARER).refusal == (403, "admin_only", "this needs the server's admin key", {})
    assert Asked("GET", "/v1/things", _BEARER).refusal == (
        405,
        "method_not_allowed",
        "use POST, PUT here",
        {b"allow": b"POST, PUT"},
    )
    assert Asked("GET", "/nowhere", _BEARER).refusal == (404, "unknown_url", "there is no such route", {})
    assert Asked("POST", "/things", _BEARER).refusal[2].endswith("; end the client's base URL with /v1")
    assert Asked("GET", "/v1/things", {}).refusal[0] == 401, "who has no key does not learn what there is"


def test_an_open_route_is_open_to_wrong_keys_and_other_sites() -> None:
    assert Asked("GET", "/health", {"authorization": "Bearer wrong-key"}).passed
    foreign = {"origin": "https://attacker.example", "host": "localhost"}
    assert Asked("GET", "/health", foreign, keys=Keys()).passed


def test_a_line_break_is_not_the_end_of_a_path() -> None:
    asked = Asked("POST", "/v1/things\n", _BEARER)
    assert asked.refusal[0] == 404
    assert asked.scope["state"]["route"] is None


@pytest.mark.parametrize(("size", "passes"), [(100, True), (101, False)])
def test_headers_are_counted_with_their_names(size: int, passes: bool) -> None:
    headers = {**_BEARER, "x": ""}
    headers["x"] = "y" * (size - sum(len(name) + len(value) for name, value in headers.items()))
    asked = Asked("POST", "/v1/things", headers, limits=Limits(max_header_bytes=100))
    assert bool(asked.passed) == passes
    if not passes:
        assert asked.refusal[:3] == (431, "headers_too_large", "the headers are larger than 100 bytes")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("127.0.0.1:80", True),
        ("[::1]", True),
        ("[::1]:8000", True),
        ("[::1", False),
        ("attacker.example", False),
        ("127.0.0.1.attacker.example:80", False),
        ("", False),
        ("192.168.1.5", False),
    ],
)
def test_without_keys_only_names_of_this_machine_are_answered(host: str, local: bool) -> None:
    asked = Asked("POST", "/v1/things", {"host": host}, keys=Keys())
    assert bool(asked.passed) == local
    if not local:
        message = "this server answers only to localhost; set an API key to use other names"
        assert asked.refusal == (403, "wrong_host", message, {})
    assert Asked("POST", "/v1/things", {"host": host}, keys=Keys(), only_local_names=False).passed
    assert Asked("POST", "/v1/things", {**_BEARER, "host": host}).passed, "a key is enough"


def test_without_a_host_nobody_is_local() -> None:
    assert Asked("POST", "/v1/things", {}, keys=Keys()).refusal[1] == "wrong_host"


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ({}, True),
        ({"origin": "http://localhost"}, True),
        ({"origin": "http://LOCALHOST"}, True),
        ({"origin": "http://localhost:1"}, False),
        ({"origin": "null"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "Cross-Site"}, False),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"origin": "https://friend.example"}, False),
    ],
)
def test_without_keys_pages_of_other_sites_are_refused(headers: dict[str, str], taken: bool) -> None:
    asked = Asked("POST", "/v1/things", {"host": "localhost", **headers}, keys=Keys())
    assert bool(asked.passed) == taken
    if not taken:
        message = "this server takes nothing from pages of other sites; set an API key"
        assert asked.refusal == (403, "wrong_origin", message, {})
    everyone = Asked("POST", "/v1/things", {"host": "localhost", **headers}, keys=Keys(), origins=("*",))
    assert everyone.passed
    assert Asked("POST", "/v1/things", {**_BEARER, "host": "localhost", **headers}).passed


def test_an_origin_that_is_allowed_may_call_and_no_other() -> None:
    for origin, passes in (("https://friend.example", True), ("https://attacker.example", False)):
        headers = {"host": "localhost", "origin": origin}
        asked = Asked("POST", "/v1/things", headers, keys=Keys(), origins=("https://friend.example",))
        assert bool(asked.passed) == passes


def test_what_is_no_request_is_not_judged() -> None:
    assert Asked("GET", "/", {}, kind="lifespan").passed
    websocket = Asked("GET", "/v1/things", _BEARER, kind="websocket")
    assert (websocket.passed, websocket.sent) == ([], [])


def test_tenants_keep_their_names_from_one_version_to_the_next() -> None:
    """Under another name a tenant finds nothing of what is stored for it."""
    assert tenant_of("key-of-somebody", b"s" * 32) == "f03e05ebc6c3881a8bc2b9cadf36855f47454ee22af414f12cafe66ccb2ddcb7"
    assert tenant_named("alice", b"s" * 32) == "3cf1e3d72d786b68c57bd9afdb1bbe2d3bb11cb3365481b78c4b70b7de68cdf1"


def test_callers_are_told_apart_by_the_digest_of_their_key() -> None:
    caller = Keys(["key-of-somebody"], secret=b"s" * 32).caller(b"Bearer key-of-somebody")
    assert caller == Caller(tenant_of("key-of-somebody", b"s" * 32), admin=False, key_id="e3ec9ca2e7d69f3f")
    assert Keys().caller(None) == Caller("", admin=True)
