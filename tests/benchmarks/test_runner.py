"""The runner: the list, errors in one line, files written, short forms."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.measure import engine_beside, load_engine
from benchmarks.common.report import Report
from benchmarks.common.stand_ins import make_model
from benchmarks.runner import as_json, find_benchmarks, main, summary_of
from benchmarks.store import disk_kills
from kvboost.bench.report import Machine, Table
from kvboost.engine import KVBoost

NEED_A_MODEL = (
    "ttft_floor",
    "ttft",
    "chat_turns",
    "first_reading",
    "exactness",
    "fidelity",
    "recompute",
    "yardstick",
    "nonprefix_ttft",
    "stripped_thinking",
    "restart",
    "start",
    "codec",
)


@pytest.mark.parametrize("command", NEED_A_MODEL)
def test_a_missing_model_is_one_line_and_exit_code_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{command}: this benchmark needs a model; give its folder with --model FOLDER\n"


@pytest.mark.parametrize("command", NEED_A_MODEL)
def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--model", str(tmp_path / "absent")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "there is no model in" in err
    assert "--model" in err


def test_an_unknown_benchmark_is_refused() -> None:
    assert main(["nonsense"]) == 2


def test_a_file_that_cannot_be_written_is_reported_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["index_scaling", "--max", "1000", "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert "create it first" in capsys.readouterr().err


def test_index_scaling_measures_every_size_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {kind: tmp_path / f"growth.{kind}" for kind in ("json", "markdown")}
    options = [part for kind, file in files.items() for part in (f"--{kind}", str(file))]
    assert main(["index_scaling", "--max", "10000", "--repeat", "2", "--batch", "5", *options]) == 0
    printed = capsys.readouterr().out
    assert files["markdown"].read_text() == printed
    for cell in ("| 1,000 ", "| 10,000 ", "| largest / smallest "):
        assert cell in printed
    document = json.loads(files["json"].read_text())
    long = document["raw"]["long_prompt"]
    assert 3000 < long["chunks"] < 6000
    for clock in ("wall_ms", "cpu_ms"):
        assert [set(laps) for laps in long[clock]] == [{"keys", "lease", "tail", "plan"}] * 2
    sizes = document["raw"]["sizes"]
    assert [entry["chunks"] for entry in sizes] == [1000, 10000]
    for entry in sizes:
        assert entry["evictions"] == 2 * 5 * 16  # the store was full: one out for each one in
        for name in ("plan_ns", "hit_us", "miss_us", "put_us"):
            assert len(entry[name]) == 2
            assert min(entry[name]) > 0


def test_index_scaling_refuses_a_size_below_the_smallest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index_scaling", "--max", "10"]) == 2
    assert "give 1000 or more" in capsys.readouterr().err


def test_every_benchmark_keeps_the_contract() -> None:
    """A summary, options, a run, and a short form whose values are options."""
    for name, path in find_benchmarks().items():
        module = importlib.import_module(path)
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        assert summary_of(path), name
        assert callable(module.run), name
        assert set(module.QUICK) <= set(vars(parser.parse_args([]))), name


def test_the_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(find_benchmarks())
    assert {"exactness", "recompute", "disk_tier", "soak", "kv_paging"} <= set(listed)


@pytest.mark.parametrize("name", ["ttft", "recompute", "yardstick", "hit_rate", "eviction", "chunk_resync", "batching"])
def test_a_short_form_needs_nothing_from_outside(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", name]) == 0
    assert "| " in capsys.readouterr().out


def test_a_first_reading_of_a_mixture_of_experts_needs_no_model(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert main(["first_reading", "--quick", "--moe", "64", "--json", str(file)]) == 0
    cold = json.loads(file.read_text())["raw"]["float32"]["cold"]
    assert [(one["tokens"], len(one["ours"]), len(one["plain"])) for one in cold] == [(200, 1, 1)]


def test_options_win_over_the_short_form(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert main(["chunk_resync", "--quick", "--documents", "1", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["arguments"] == {"documents": 1, "quick": True}


def test_json_carries_raw_samples_and_no_folders() -> None:
    machine = Machine("2030-01-02", "A CPU", 2, 2, "2.13", "5.22", "float32", "tiny")
    report = Report("limit", [Table("t", machine, ["a"], [["1"]])], {"float32": [1.5]})
    text = as_json(report, {"model": Path("/secret/place/tiny"), "text": [Path("/secret/a.txt")], "repeat": 3})
    document = json.loads(text)
    assert document["arguments"] == {"model": "tiny", "text": ["a.txt"], "repeat": 3}
    assert document["raw"] == {"float32": [1.5]}
    assert document["tables"][0]["machine"]["cpu"] == "A CPU"
    assert "secret" not in text


def test_a_claim_that_does_not_hold_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disk_kills, "look", lambda *args: {"lost": 1})
    assert main(["disk_kills", "--kills", "2"]) == 1
    assert "did not hold" in capsys.readouterr().err


def test_the_commands_for_a_gpu_can_be_run_as_written() -> None:
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    commands = re.findall(r"^python -m benchmarks (\w+) ([^#\n]*)", text, flags=re.MULTILINE)
    assert commands
    for name, options in commands:
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(find_benchmarks()[name]).add_arguments(parser)
        args = parser.parse_args(options.split())
        assert args.device == "cuda", name
    assert not re.search(r"`python -m benchmarks \w+`", text), "a benchmark without its model and device"


def test_device_and_numerics_reach_every_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = argparse.Namespace(model=make_model(tmp_path), device="cpu", numerics="fast")
    asked: list[Any] = []
    load = KVBoost.from_pretrained
    monkeypatch.setattr(
        KVBoost, "from_pretrained", lambda *given, **more: (asked.append(more["device"]), load(*given, **more))[1]
    )
    with load_engine(args, dtype="float32") as engine, engine_beside(engine, quality="exact") as other:
        assert asked == ["cpu"]
        assert engine.config.numerics == other.config.numerics == "fast"
