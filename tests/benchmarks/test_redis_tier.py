"""The Redis benchmark: all of its tables, on a server of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.runner import main
from benchmarks.store import redis_tier


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_every_table_is_filled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    options = ["--repeat", "2", "--blocks", "2", "--small", "20", "--faults", "refused", "--json", str(file)]
    assert main(["redis_tier", *options]) in (0, 1)  # 1: this machine stood still when it mattered
    printed = capsys.readouterr().out
    for cell in ("| the tier ", "| a block of the tier ", "| refused "):
        assert cell in printed
    raw = json.loads(file.read_text())["raw"]
    assert [len(samples) for column in raw["speed"] for samples in column.values()] == [2] * 12
    assert len(raw["faults"]["refused"]["open"]) == 200


def test_a_fault_that_costs_too_much_is_not_bearable() -> None:
    good = {"first": [30.0, 0.1, 0.1], "open": [0.1, 5.0, 0.1], "recovery_s": 1.0}
    assert redis_tier.is_bearable(good)
    for worse in ({"first": [0.1, 0.1, 101.0]}, {"open": [2.0, 2.0, 0.1]}, {"recovery_s": 10.1}):
        assert not redis_tier.is_bearable(good | worse)


def test_a_server_elsewhere_is_refused_for_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["redis_tier", "--url", "redis://192.0.2.1:1/0"]) == 2
    assert "127.0.0.1" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-server or redis-cli is not installed")
def test_shared_tiers_are_compared_with_their_bare_clients(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert main(["--quick", "shared_tiers", "--json", str(file)]) == 0
    raw = json.loads(file.read_text())["raw"]
    full = [raw.pop("before"), raw.pop("full")]
    assert min(put for put, *_ in full) > 0.0
    assert full[1][-1] > 0, "the server that is to be full evicted nothing"
    assert set(raw) == {f"{kind} {what}" for kind in ("redis", "cluster") for what in ("put", "get")}
    assert all(min(rates) > 0.0 for column in raw.values() for rates in column.values())
