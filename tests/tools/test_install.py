from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvboost.errors import EXTRAS
from tools import install
from tools.package import ROOT

_FOR_DEVELOPERS = {"dev", "docs", "release", "mutation"}


def test_every_extra_for_users_is_installed_but_vllm() -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(given) - _FOR_DEVELOPERS - {"vllm"}


def test_an_unknown_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        install.main(["redsi"])
    assert "there is no extra 'redsi'; the extras are cli, serve" in capsys.readouterr().err


def test_without_a_wheel_it_says_how_to_build_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "DIST", tmp_path)
    with pytest.raises(SystemExit):
        install.main(["redis"])
    assert "run python -m tools.package first" in capsys.readouterr().err
