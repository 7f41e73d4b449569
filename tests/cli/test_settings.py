"""Flags, environment and file: who wins, what is refused, what is shown."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvboost import KVBoost
from kvboost.cli.flags import read_settings, with_settings
from kvboost.cli.settings import SECTIONS, SETTINGS, Settings
from kvboost.config import EngineConfig, LoadConfig, RunnerConfig
from kvboost.engine.assembly import split_settings
from kvboost.errors import ConfigError
from kvboost.integrations.ray.config import RayConfig
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve import Limits, ServerConfig


def read(file: Path | None = None, **flags: Any) -> Settings:
    """As a command reads them; a flag of a table is ``serve__port``."""
    named = {"__".join(filter(None, (setting.section, setting.name))): setting for setting in SETTINGS}
    return read_settings({named[name]: value for name, value in flags.items()}, file=file)


def source(settings: Settings, name: str) -> str | None:
    return next((where for setting, where in settings.sources.items() if setting.name == name), None)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "k.toml"
    file.write_text('disk_cache_dir = "/file"\ntenant = "file"\nkv_cache_bits = 8\nreuse_generated = true\n')
    monkeypatch.setenv("KVBOOST_TENANT", "environment")
    monkeypatch.setenv("KVBOOST_DISK_CACHE_DIR", "/environment")
    monkeypatch.setenv("KVBOOST_CHUNK_SIZE", "")  # as if it were not there
    monkeypatch.setenv("KVBOOST_MODELS", "not ours")
    settings = read(file, disk_cache_dir="/flag")
    assert settings.engine() == {
        "disk_cache_dir": Path("/flag"),
        "tenant": "environment",
        "kv_cache_bits": 8,
        "reuse_generated": True,
    }
    assert [source(settings, name) for name in ("disk_cache_dir", "tenant", "kv_cache_bits", "dtype")] == [
        "--disk-cache-dir",
        "KVBOOST_TENANT",
        str(file),
        None,
    ]


def test_every_field_is_a_setting_with_its_own_default_and_help() -> None:
    for configs in SECTIONS.values():
        for config in configs:
            mine = [setting for setting in SETTINGS if setting.config is config]
            assert [setting.name for setting in mine] == [field.name for field in dataclasses.fields(config)]
            assert all(len(setting.help) > 10 and "``" not in setting.help for setting in mine), config
            assert read().of(config) == config()
    serve_flags = [setting.flag for setting in SETTINGS if setting.section in ("", "serve")]
    assert len(serve_flags) == len(set(serve_flags))
    variables = [setting.variable for setting in SETTINGS]
    assert len(variables) == len(set(variables))


def test_the_settings_of_loading_and_running_are_what_these_take() -> None:
    loading = inspect.signature(KVBoost.from_pretrained).parameters
    running = inspect.signature(BatchRunner).parameters
    for config, parameters in ((LoadConfig, loading), (RunnerConfig, running)):
        for field in dataclasses.fields(config):
            if field.name != "revision":
                assert parameters[field.name].default == field.default, field.name
    assert split_settings({"revision": "v1", "quality": "fast"}) == ({"quality": "fast"}, {"revision": "v1"})


def test_values_are_read_as_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"QUALITY": "0.05", "STRICT": "no", "CHUNK_SIZE": "64", "DISK_CACHE_DIR": "~/kv", "CACHE_BYTES": "1GiB"}
    for name, value in given.items():
        monkeypatch.setenv(f"KVBOOST_{name}", value)
    assert read().engine() == {
        "quality": 0.05,
        "strict": False,
        "chunk_size": 64,
        "disk_cache_dir": Path.home() / "kv",
        "cache_bytes": "1GiB",
    }
    assert EngineConfig(**read().engine()).cache_bytes == 2**30
    assert read(quality="fast").engine()["quality"] == "fast"
    assert read(cache_bytes="1000").engine()["cache_bytes"] == 1000


def test_lists_come_from_flags_words_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text('[serve]\ncors_origin = ["https://file.example"]\n')
    assert read(file).of(ServerConfig).cors_origin == ("https://file.example",)
    monkeypatch.setenv("KVBOOST_SERVE_CORS_ORIGIN", "https://a.example, https://b.example")
    assert read(file).of(ServerConfig).cors_origin == ("https://a.example", "https://b.example")
    given = read(file, serve__cors_origin=["https://c.example"])
    assert given.of(ServerConfig).cors_origin == ("https://c.example",)
    assert 'cors_origin = ["https://c.example"]  # --cors-origin' in given.show_config("serve")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('disk_cache_dri = "x"', "disk_cache_dri in .* did you mean disk_cache_dir"),
        ("zzz = 1", "--show-config"),
        ("= 1", "cannot be read as TOML"),
        ('chunk_size = "many"', "chunk_size in .* is 'many'; give a valid integer"),
        ("chunk_size = [1]", "give a valid integer"),
        ("reuse_generated = 3", "give a valid boolean"),
        ("[serve]\nprot = 1", "did you mean port"),
        ("[serve]\nmax_tool = 1", "did you mean max_tools"),
        ("[server]\nport = 1", "did you mean serve"),
        ("serve = 1", "serve in "),
        ("port = 1", r"port in .* is not in its place; write it under \[serve\]"),
        ("max_new_tokens = 1", r"write it under \[serve\]"),
        ('[serve]\ntenant = "x"', "tenant in .*; write it before all tables"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "k.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read(file)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("KVBOOST_KV_CACHE_BITS", "eight", "KVBOOST_KV_CACHE_BITS is 'eight'; give a valid integer"),
        ("KVBOOST_SERVE_PORT", "http", "KVBOOST_SERVE_PORT is 'http'; give a valid integer"),
        ("KVBOOST_CACHE_DIR", "x", "did you mean KVBOOST_DISK_CACHE_DIR"),
        ("KVBOOST_SERVE_PROT", "1", "did you mean KVBOOST_SERVE_PORT"),
        ("KVBOOST_SERVE_COLOUR", "1", "KVBOOST_SERVE_COLOUR is not a setting"),
        ("KVBOOST_SERVE_STRICT", "1", "did you mean KVBOOST_STRICT"),
    ],
)
def test_a_mistake_in_the_environment_is_named(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        read()


def test_a_mistake_in_a_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_CHUNK_SIZE", "64")
    with pytest.raises(ConfigError, match="--chunk-size is 'x'; give a valid integer"):
        read(chunk_size="x")


def test_every_limit_can_be_set_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [field.name for field in dataclasses.fields(Limits)]
    file = tmp_path / "k.toml"
    file.write_text("[serve]\n" + "".join(f"{name} = 7\n" for name in names))
    assert read(file).of(Limits) == Limits(**dict.fromkeys(names, 7))
    for name in names:
        monkeypatch.setenv(f"KVBOOST_SERVE_{name.upper()}", "8")
    assert read(file).of(Limits) == Limits(**dict.fromkeys(names, 8))
    flags = {f"serve__{name}": "9" for name in names}
    assert read(file, **flags).of(Limits) == Limits(**dict.fromkeys(names, 9))


def test_tables_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "k.toml"
    file.write_text("chunk_size = 64\n[serve]\nport = 81\nmax_new_tokens = 5\n[ray]\nreplicas = 6\n")
    assert read(file).of(ServerConfig).port == 81
    assert read(file).of(Limits).max_new_tokens == 5
    assert read(file).of(RayConfig).replicas == 6
    assert read(file).engine() == {"chunk_size": 64}
    monkeypatch.setenv("KVBOOST_SERVE_PORT", "82")
    assert read(file).of(ServerConfig).port == 82
    assert read(file).of(Limits).max_new_tokens == 5


def test_what_is_shown_gives_the_same_again_and_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_KV_CACHE_BITS", "8")
    monkeypatch.setenv("KVBOOST_REUSE_GENERATED", "true")
    settings = read(disk_cache_dir='a "quoted" dir', serve__port="81")
    shown = settings.show_config("", "serve")
    file = tmp_path / "k.toml"
    file.write_text(shown)
    assert tomllib.loads(shown)["serve"]["port"] == 81
    assert "ray" not in tomllib.loads(shown)
    assert "kv_cache_bits = 8  # KVBOOST_KV_CACHE_BITS" in shown
    monkeypatch.delenv("KVBOOST_KV_CACHE_BITS")
    monkeypatch.delenv("KVBOOST_REUSE_GENERATED")
    assert read(file).values == settings.values
    for url in ("redis://:pass@h:1/0", "rediss://user:pass@h:1/0"):
        shown = read(remote_url=url).show_config("")
        assert "pass" not in shown
        assert "***@h:1/0" in shown


def test_a_command_gets_flags_and_settings() -> None:
    app = typer.Typer()
    got: list[Settings] = []

    @app.command()
    @with_settings("serve")
    def serve(model: str, *, settings: Settings) -> None:
        got.append(settings)
        assert model == "m"

    run = CliRunner().invoke(app, ["m", "--port", "81", "--tenant", "acme", "--no-strict", "--max-tools", "3"])
    assert run.exit_code == 0, run.output
    assert (got[0].of(ServerConfig).port, got[0].of(Limits).max_tools) == (81, 3)
    assert got[0].engine() == {"tenant": "acme", "strict": False}
    shown = CliRunner().invoke(app, ["m", "--show-config", "--quality", "0.02"], env={"KVBOOST_SERVE_PORT": "82"})
    assert shown.exit_code == 0
    assert len(got) == 1
    assert "quality = 0.02  # --quality" in shown.output
    assert "port = 82  # KVBOOST_SERVE_PORT" in shown.output
    assert "max_tools = 128  # default" in shown.output
