"""Flags, environment and file: who wins, what is refused, what is shown."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvboost.cli.settings import ENGINE, Option, Settings, resolve, with_settings
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError

PORT = Option("port", int, "Where to listen.", default=8000)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text('cache_dir = "/file"\ntenant = "file"\nkv_cache_bits = 8\nreuse_generated = true\n')
    environ = {"KVBOOST_TENANT": "environment", "KVBOOST_CACHE_DIR": "/environment", "KVBOOST_MODELS": "not ours"}
    settings = resolve({"cache_dir": "/flag", "tenant": None}, file=file, environ=environ)
    assert settings.engine() == {
        "disk_cache_dir": "/flag",
        "tenant": "environment",
        "kv_cache_bits": 8,
        "reuse_generated": True,
    }
    assert [settings.sources[name] for name in ("cache_dir", "tenant", "kv_cache_bits", "dtype")] == [
        "--cache-dir",
        "KVBOOST_TENANT",
        str(file),
        "default",
    ]


def test_every_setting_is_one_that_an_engine_takes() -> None:
    arguments = {option.argument or option.name for option in ENGINE}
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert arguments - fields == {"dtype", "device", "weight_budget", "weight_dir"}  # of from_pretrained
    assert fields - arguments == {"force_approx"}  # for measurements


def test_values_are_read_as_what_they_are() -> None:
    environ = {
        "KVBOOST_QUALITY": "0.05",
        "KVBOOST_STRICT": "no",
        "KVBOOST_CHUNK_SIZE": "64",
        "KVBOOST_CACHE_DIR": "~/kv",
    }
    settings = resolve({}, environ=environ)
    assert settings["quality"] == 0.05
    assert settings["strict"] is False
    assert settings["chunk_size"] == 64
    assert settings["cache_dir"] == str(Path.home() / "kv")
    EngineConfig(**settings.engine())
    assert resolve({"quality": "fast"}, environ={})["quality"] == "fast"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('cache_dri = "x"', "did you mean cache_dir"),
        ("zzz = 1", "--show-config"),
        ("= 1", "cannot be read as TOML"),
        ('chunk_size = "many"', "give a whole number"),
        ("chunk_size = [1]", "give a whole number"),
        ("reuse_generated = 3", "give true or false"),
        ("[serve]\nprot = 1", "did you mean port"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "k.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve({}, file=file, environ={}, own=(PORT,), section="serve")


def test_a_mistake_in_the_environment_is_named() -> None:
    with pytest.raises(ConfigError, match="KVBOOST_KV_CACHE_BITS is 'eight'"):
        resolve({}, environ={"KVBOOST_KV_CACHE_BITS": "eight"})


def test_a_command_has_settings_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text("chunk_size = 64\n[serve]\nport = 81\n[other]\nx = 1\n")
    own = {"own": (PORT,), "section": "serve"}
    assert resolve({}, environ={}, **own)["port"] == 8000  # type: ignore[arg-type]
    assert resolve({}, file=file, environ={}, **own)["port"] == 81  # type: ignore[arg-type]
    assert resolve({}, file=file, environ={"KVBOOST_SERVE_PORT": "82"}, **own)["port"] == 82  # type: ignore[arg-type]
    assert resolve({}, file=file, environ={"KVBOOST_PORT": "83"}, **own)["port"] == 81  # type: ignore[arg-type]
    assert "port" not in resolve({}, file=file, environ={}).values


def test_what_is_shown_gives_the_same_again_and_no_password(tmp_path: Path) -> None:
    settings = resolve(
        {"cache_dir": 'a "quoted" dir', "port": 81},
        environ={"KVBOOST_KV_CACHE_BITS": "8", "KVBOOST_REUSE_GENERATED": "true"},
        own=(PORT,),
        section="serve",
    )
    shown = settings.show_config()
    file = tmp_path / "k.toml"
    file.write_text(shown)
    assert tomllib.loads(shown)["serve"] == {"port": 81}
    again = resolve({}, file=file, environ={}, own=(PORT,), section="serve")
    assert again.engine() == settings.engine()
    for url in ("redis://:pass@h:1/0", "rediss://user:pass@h:1/0"):
        shown = resolve({"remote_url": url}, environ={}).show_config()
        assert "pass" not in shown
        assert "***@h:1/0" in shown


def test_a_command_gets_flags_and_settings() -> None:
    app = typer.Typer()
    got: list[Settings] = []

    @app.command()
    @with_settings(PORT, section="serve")
    def serve(model: str, *, settings: Settings) -> None:
        got.append(settings)
        assert model == "m"

    run = CliRunner().invoke(app, ["m", "--port", "81", "--tenant", "acme"])
    assert run.exit_code == 0, run.output
    assert (got[0]["port"], got[0]["tenant"], got[0].engine()) == (81, "acme", {"tenant": "acme"})
    shown = CliRunner().invoke(app, ["m", "--show-config", "--quality", "0.02"], env={"KVBOOST_SERVE_PORT": "82"})
    assert shown.exit_code == 0
    assert len(got) == 1
    assert "quality = 0.02  # --quality" in shown.output
    assert "port = 82  # KVBOOST_SERVE_PORT" in shown.output
