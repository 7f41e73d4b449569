"""Files of keys: names, and being read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost import ConfigError
from kvboost.serve import Keys
from kvboost.serve.app import make_app
from kvboost.serve.security.auth import tenant_named, tenant_of
from kvboost.serve.security.key_files import check_key
from tests.serve.asgi import ask
from tests.serve.conftest import KEY, OTHER_KEY, SECRET, Running


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
