from __future__ import annotations

import hmac
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from kvboost import ConfigError, KVBoost
from kvboost.serve.app import ACCESS
from kvboost.serve.security.auth import Access, Keys, check_binding, is_loopback, tenant_of
from tests.serve.conftest import ADMIN_KEY, KEY, OTHER_KEY, Running

_OPEN = {"/", "/health", "/ready"}


def _routes(running: Running) -> list[tuple[str, str]]:
    found = []
    for route in running.app.routes:
        assert isinstance(route, Route | APIRoute), "a mount would hide routes from this test"
        found += [(method, route.path) for method in (route.methods or set()) - {"HEAD"}]
    return found


def test_every_route_is_listed_and_every_listed_route_is_there(keyed: Running) -> None:
    assert set(_routes(keyed)) == set(ACCESS)
    assert {path for (_, path), access in ACCESS.items() if access is Access.OPEN} == _OPEN


def test_the_table_in_the_documentation_is_that_of_the_app() -> None:
    """`POST /a`, `/b` are two routes of one method."""
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    section = text.partition("## Routes and who may call them\n")[2].partition("\n\nThese are all routes")[0]
    who = {"everybody": Access.OPEN, "API key": Access.USER, "admin key": Access.ADMIN}
    listed = {}
    for row in section.strip().splitlines()[2:]:
        routes, callers, _ = row.strip("| ").split(" | ", 2)
        method = ""
        for told, path in re.findall(r"`(?:([A-Z]+) )?(/[^`]*)`", routes):
            method = told or method
            listed[method, path] = who[callers.partition(" (")[0]]
    assert listed == {(method, path.replace(":path", "")): access for (method, path), access in ACCESS.items()}


def test_every_route_is_denied_without_a_key(keyed: Running) -> None:
    with keyed.http(None) as http:
        for method, path in _routes(keyed):
            answer = http.request(method, path.replace("{model:path}", "tiny").replace("{pin}", "x"), json={})
            assert answer.status_code == (200 if path in _OPEN else 401), path
            if path not in _OPEN:
                told = answer.json()["error"]
                assert told["type"] == "authentication_error"
                assert told.get("code") == (None if path.startswith("/v1/messages") else "invalid_api_key")


@pytest.mark.parametrize(
    "header",
    ["Bearer wrong-key-of-somebody", "Bearer", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"],
)
def test_wrong_keys_are_denied(keyed: Running, header: str) -> None:
    with keyed.http(None) as http:
        assert http.get("/v1/models", headers={"Authorization": header}).status_code == 401


def test_two_keys_are_none(keyed: Running) -> None:
    with keyed.http(None) as http:
        headers = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")]
        assert http.get("/v1/models", headers=headers).status_code == 401


def test_admin_routes_need_the_admins_key(keyed: Running) -> None:
    admin = [(method, path) for (method, path), access in ACCESS.items() if access is Access.ADMIN]
    assert len(admin) >= 5
    with keyed.http(KEY) as http:
        for method, path in admin:
            assert http.request(method, path, json={}).status_code == 403, path
    with keyed.http(ADMIN_KEY) as http:
        assert http.get("/v1/cache").status_code == 200
        assert http.get("/metrics").status_code == 200


def test_what_is_not_listed_is_not_there(keyed: Running) -> None:
    with keyed.http() as http:
        assert http.get("/docs").status_code == 404
        missed = http.post("/chat/completions", json={})
        assert missed.status_code == 404
        assert missed.json()["error"]["message"].endswith("end the client's base URL with /v1")
        assert "/v1" not in http.post("/nowhere").json()["error"]["message"]
        assert http.get("/v1/chat/completions/").status_code == 404
        assert http.get("/v1/chat/completions").status_code == 405
        assert http.delete("/v1/models").headers["allow"] == "GET"
        assert http.get("/../v1/cache").status_code in (403, 404)
    with keyed.http(None) as http:
        assert http.get("/docs").status_code == 401, "who has no key does not learn what there is"
        assert http.options("/v1/models").status_code == 401


def test_without_keys_this_machine_may_do_everything_under_its_own_name_only(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]
) -> None:
    running = start_server(make_engine())
    with running.http(None) as http:
        assert http.get("/v1/cache").status_code == 200
        assert http.get("/v1/cache", headers={"Host": "localhost:8000"}).status_code == 200
        rebound = http.get("/v1/cache", headers={"Host": "attacker.example"})
        assert rebound.status_code == 403
        assert rebound.json()["error"]["code"] == "wrong_host"


@pytest.fixture(scope="module")
def open_server(start_server: Callable[..., Running], make_engine: Callable[..., KVBoost]) -> Running:
    return start_server(make_engine())


@pytest.mark.parametrize(("method", "path"), [listed for listed in ACCESS if listed[0] != "GET"])
def test_without_keys_pages_of_other_sites_may_do_nothing(open_server: Running, method: str, path: str) -> None:
    foreign: list[dict[str, str]] = [
        {"Origin": "https://attacker.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": f"http://127.0.0.1:{open_server.port + 1}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": open_server.url, "Sec-Fetch-Site": "cross-site"},
    ]
    with open_server.http(None) as http:
        for headers in foreign:
            answer = http.request(method, path, json={}, headers=headers)
            assert answer.status_code == 403, headers
            assert "pages of other sites" in answer.json()["error"]["message"]
        twice = [("Origin", open_server.url), ("Origin", "https://attacker.example")]
        assert http.request(method, path, json={}, headers=twice).status_code == 403
        own = {"Origin": open_server.url, "Sec-Fetch-Site": "same-origin"}
        assert http.request(method, path, json={}, headers=own).status_code != 403


def test_with_keys_or_for_what_tells_nothing_other_sites_are_taken(keyed: Running, open_server: Running) -> None:
    foreign = {"Origin": "https://attacker.example", "Sec-Fetch-Site": "cross-site"}
    with keyed.http() as http:
        assert http.post("/tokenize", json={"prompt": "x"}, headers=foreign).status_code == 200
    assert httpx.get(open_server.url + "/", headers=foreign).status_code == 200, "a link to the page"
    assert httpx.get(open_server.url + "/v1/cache", headers=foreign).status_code == 403


def test_other_addresses_need_a_key_or_a_word() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(ConfigError, match="API key"):
            check_binding(host, Keys(), allow_open=False)
        check_binding(host, Keys([KEY]), allow_open=False)
        check_binding(host, Keys(), allow_open=True)
    for host in ("127.0.0.1", "::1", "[::1]", "localhost"):
        assert is_loopback(host)
        check_binding(host, Keys(), allow_open=False)


@pytest.mark.parametrize(
    "arguments",
    [
        {"api_keys": ["short"]},
        {"api_keys": ["has a space in it"]},
        {"api_keys": [KEY], "admin_key": KEY},
        {"api_keys": [], "admin_key": ADMIN_KEY},
    ],
    ids=str,
)
def test_keys_that_protect_nothing_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Keys(arguments.pop("api_keys"), **arguments)


def test_a_tenant_outlives_a_restart_and_does_not_tell_the_key() -> None:
    secret = b"s" * 32
    assert tenant_of(KEY, secret) == tenant_of(KEY, secret) != tenant_of(KEY + "x", secret)
    assert KEY not in tenant_of(KEY, secret)
    caller = Keys([KEY, ADMIN_KEY], secret=secret).caller(f"bearer {ADMIN_KEY}".encode())
    assert caller is not None
    assert caller.tenant == tenant_of(ADMIN_KEY, secret)
    assert not caller.admin


def _file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_tenants_are_named_with_the_secret_of_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare hash of a key would let whoever has the cache try keys against it."""
    keys = _file(tmp_path / "keys", KEY)
    tenants = []
    for home in ("one", "one", "other"):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / home))
        tenants += Keys.from_files(keys, None).tenants
    assert tenants[0] == tenants[1] != tenants[2], "the tenants of two installations have the same names"
    secret = tmp_path / "one" / "kvboost" / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert Keys.from_files(keys, None, secret=secret).tenants == tenants[:1]
    assert not Keys.from_files(None, None)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/kvboost")
    with pytest.warns(RuntimeWarning, match="give a secret_file"):
        assert Keys.from_files(keys, None).tenants != tenants[:1]
    with pytest.raises(ConfigError, match="secret_file="):
        Keys.from_files(keys, None, secret=tmp_path / "absent")


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    keys, admin = _file(tmp_path / "k", KEY), _file(tmp_path / "a", ADMIN_KEY, mode)
    with pytest.raises(ConfigError, match=f"admin_key_file=.* run: chmod 600 {admin}"):
        Keys.from_files(keys, admin)
    keys.chmod(mode)
    with pytest.raises(ConfigError, match=f"api_key_file=.* run: chmod 600 {keys}"):
        Keys.from_files(keys, None)


def test_every_key_is_compared_in_constant_time_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    right = hmac.compare_digest

    def watched(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return right(one, other)

    monkeypatch.setattr("kvboost.serve.security.auth.hmac.compare_digest", watched)
    keys = Keys([KEY, OTHER_KEY, "a" * 4096], admin_key=ADMIN_KEY)
    for given in (KEY, ADMIN_KEY, "b" * 5, "a" * 4095):
        compared.clear()
        keys.caller(f"Bearer {given}".encode())
        assert compared == [(32, 32)] * 4, "digests of one length, all of them"


def test_other_sites_get_no_leave_to_read(keyed: Running) -> None:
    answer = httpx.get(keyed.url + "/health", headers={"Origin": "https://attacker.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
