"""Files of keys: names, and being read again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvboost import ConfigError, KVBoost
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve import Keys, Limits
from kvboost.serve.app import make_app
from kvboost.serve.security.auth import check_key, tenant_named, tenant_of
from tests.serve.asgi import ask
from tests.serve.conftest import ADMIN_KEY, KEY, OTHER_KEY, SECRET, Running


def _tenant(keys: Keys, key: str) -> str | None:
    caller = keys.caller(f"Bearer {key}".encode())
    return caller.tenant if caller is not None else None


def test_keys_of_one_name_are_one_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(f"alice: {KEY}\n\n  alice:  {KEY}-2\nbob: {OTHER_KEY}\nkey:with:colons\n")
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "secret").write_bytes(SECRET)
    keys = Keys.from_files(file, None, secret=tmp_path / "secret")
    assert _tenant(keys, KEY) == _tenant(keys, f"{KEY}-2") == tenant_named("alice", SECRET)
    assert _tenant(keys, OTHER_KEY) == tenant_named("bob", SECRET)
    assert _tenant(keys, "key:with:colons") == tenant_of("key:with:colons", SECRET), "without a name it stays its own"
    assert len(keys.tenants) == 3
    callers = [keys.caller(f"Bearer {key}".encode()) for key in (KEY, f"{KEY}-2")]
    assert len({caller.key_id for caller in callers if caller is not None}) == 2, "each key has its own rate"
    assert tenant_named("alice", SECRET) != tenant_of("alice", SECRET)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"alice: {KEY} {OTHER_KEY}", "line 1 of"),
        (f"{KEY}\nal ice: {KEY}", "line 2 of"),
        (f"alice: {KEY}\nbob: {KEY}", "two tenants"),
        (f"alice: {KEY}\n{KEY}", "two tenants"),
        (f"{KEY}\n\nalice: short", "the key in line 3 of .* 8 or more"),
    ],
)
def test_a_line_that_is_no_key_is_said_without_showing_it(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        Keys.from_files(tmp_path / "keys", None)
    assert KEY not in str(refused.value)


def test_keys_are_read_again_and_stay_if_they_cannot_be(keyed: Running, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(KEY)
    keys = Keys.from_files(file, None)
    tenant = _tenant(keys, KEY)
    app = make_app(keyed.engine, keyed.runner, model_name="tiny", keys=keys)
    file.write_text(OTHER_KEY)
    assert ask(app, "GET", "/v1/models", key=KEY).status_code == 200, "nobody has asked to read it again"
    keys.read_again()
    assert ask(app, "GET", "/v1/models", key=KEY).status_code == 401
    assert ask(app, "GET", "/v1/models", key=OTHER_KEY).status_code == 200
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        keys.read_again()
    assert ask(app, "GET", "/v1/models", key=OTHER_KEY).status_code == 200
    file.write_text(KEY)
    keys.read_again()
    assert _tenant(keys, KEY) == tenant
    Keys([KEY]).read_again()


def test_a_view_that_cannot_be_closed_keeps_no_other_one_and_a_new_key_does(
    make_engine: Callable[..., KVBoost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("kvboost.serve.generation.service._LOOK_S", 0.05)
    file, every = tmp_path / "keys", [f"a-key-of-number-{number}" for number in range(3)]
    file.touch(0o600)
    file.write_text("\n".join([*every, OTHER_KEY]))
    keys = Keys.from_files(file, None)
    of = {_tenant(keys, key): key for key in every}
    closed: list[str | None] = []

    with make_engine() as engine, BatchRunner(engine) as runner:
        app = make_app(engine, runner, model_name="tiny", keys=keys)
        for tenant in keys.tenants:
            engine.for_tenant(tenant)
        right = KVBoost.close

        def close(view: KVBoost) -> None:
            right(view)
            closed.append(view.config.tenant)
            if len(closed) == 1:  # one of those that wait for their turn has a key again
                again = next(tenant for tenant in of if tenant not in closed)
                file.write_text(f"{OTHER_KEY}\n{of[again]}")
                keys.read_again()
                raise OSError("the disk is full")

        before = keys.callers
        file.write_text(OTHER_KEY)
        keys.read_again()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(KVBoost, "close", close)
                asyncio.run(asyncio.wait_for(app.state.service.revoke(before), 60))
            assert len(closed) == 2
            kept = {_tenant(keys, key) for key in every} - {None}
            assert len(kept) == 1
            assert {view.config.tenant for view in engine.views()[1:]} == {_tenant(keys, OTHER_KEY), *kept}
            assert "held failed: OSError" in caplog.text
        finally:
            app.state.service.close()


def test_what_a_revoked_key_holds_is_released_once_its_requests_are_done(
    make_engine: Callable[..., KVBoost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.serve.generation.service._LOOK_S", 0.05)
    file, admin = tmp_path / "keys", tmp_path / "admin"
    for path, text in ((file, f"{KEY}\n{OTHER_KEY}"), (admin, ADMIN_KEY)):
        path.touch(0o600)
        path.write_text(text)
    keys = Keys.from_files(file, admin)
    gone, stays = _tenant(keys, KEY), _tenant(keys, OTHER_KEY)
    assert gone is not None
    prompt = "A sentence that is long enough to be more than one chunk. " * 3

    async def run(app: Any, engine: KVBoost) -> None:
        service = app.state.service
        transport = httpx.ASGITransport(app=app)

        def ask(path: str, key: str, **body: Any) -> Any:
            headers = {"Authorization": f"Bearer {key}"}
            return client.post(path, headers=headers, json=body, timeout=60)

        def tenants() -> set[str | None]:
            return {view.config.tenant for view in engine.views()[1:]}

        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for key in (KEY, OTHER_KEY):
                (await ask("/v1/responses", key, model="tiny", input=prompt, max_output_tokens=16)).raise_for_status()
            (await ask("/v1/cache/pin", ADMIN_KEY, prompt=prompt, tenant=gone)).raise_for_status()
            assert tenants() == {gone, stays}
            counted = service.metrics.text()
            fields = {"model": "tiny", "max_tokens": 1500, "ignore_eos": True}
            running = asyncio.create_task(ask("/v1/completions", KEY, prompt="on and on", **fields))
            while not service.runner.load().running:
                await asyncio.sleep(0.01)
            before = keys.callers
            file.write_text(OTHER_KEY)
            keys.read_again()
            service.under_way[gone] += 1  # another one, whose body is read
            revoked = asyncio.create_task(service.revoke(before))
            await asyncio.sleep(0.3)
            assert not running.done(), "too short to show anything"
            assert tenants() == {gone, stays}, "closed under a running request"
            answer = await running
            assert answer.json()["usage"]["completion_tokens"] == 1500
            await asyncio.sleep(0.3)
            assert tenants() == {gone, stays}, "closed under a request that is read"
            service.under_way[gone] -= 1
            await asyncio.wait_for(revoked, 10)
            assert tenants() == {stays}
            assert service.pins.listed() == []
            assert list(service.responses._tenants) == [stays]
            known = {caller.key_id for caller in keys.callers}
            assert {key_id for key_id, _ in service.rates._budgets} <= known
            assert _misses(service.metrics.text()) >= _misses(counted), "a counter must not fall"

    with make_engine() as engine, BatchRunner(engine) as runner:
        limits = Limits(max_requests_per_minute=1000)
        app = make_app(engine, runner, model_name="tiny", keys=keys, limits=limits)
        try:
            asyncio.run(run(app, engine))
        finally:
            app.state.service.close()


def _misses(text: bytes) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(b"kvboost_chunk_misses_total")]
    return float(line.split()[1])


def test_tenants_keep_their_names_where_no_secret_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/kvboost")
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(KEY)
    with pytest.warns(RuntimeWarning, match="give a secret_file"):
        keys = Keys.from_files(file, None)
    tenant = _tenant(keys, KEY)
    keys.read_again()
    assert _tenant(keys, KEY) == tenant


@pytest.mark.parametrize("key", ["1234567", "1234567é", "1234567\t8", "1234 5678", "12345678\n"])
def test_a_key_that_can_be_guessed_or_not_be_sent_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="^a key needs 8 or more printable ASCII characters without spaces; make one"):
        check_key(key)
    check_key("12345678")


def test_a_server_without_keys_makes_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    assert not Keys.from_files(None, None)
    assert not (tmp_path / "home").exists()
