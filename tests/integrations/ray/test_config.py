"""What is said before Ray starts anything. Needs no Ray."""

from __future__ import annotations

import sys

import pytest

from kvboost.cli.main import main
from kvboost.errors import ConfigError
from kvboost.integrations.ray import RayConfig


@pytest.mark.parametrize(
    "given",
    [
        {"replicas": 0},
        {"fronts": 0},
        {"replicas": 3, "max_replicas": 2},
        {"target_requests": 0.0},
        {"replica_gpus": -1.0},
    ],
)
def test_a_fleet_that_cannot_be_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        RayConfig(**given)


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    monkeypatch.setattr("kvboost.integrations.ray.config.find_spec", lambda name: None)
    assert main(["serve", "no-model", "--ray"]) == 2
    assert 'pip install ".[ray]"' in capsys.readouterr().err


def test_a_fleets_settings_need_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-model", "--replicas", "3"]) == 2
    assert "add --ray" in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["serve", "./nowhere", "--ray"], "there is no model folder at ./nowhere"),
        (["serve", "a/model", "--ray", "--remote-url", "localhost"], "redis://"),
    ],
)
def test_what_replicas_would_refuse_is_said_before_ray_starts(
    command: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("kvboost.integrations.ray.run_app", started)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(command) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_a_clusters_machines_may_have_a_folder_that_this_one_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    monkeypatch.setattr("kvboost.integrations.ray.run_app", lambda *given, **_: ran.append(given))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert main(["serve", "/models/there", "--ray"]) == 0
    assert len(ran) == 1
