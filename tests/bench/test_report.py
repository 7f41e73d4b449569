"""The report helpers: spread, ratios, tables, machine line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost.bench.report import Machine, Spread, Table, cpu_model, describe_machine, ratios

MACHINE = Machine("2030-01-02", "A CPU", 2, 2, "2.13", "5.22", "float32", "tiny")


def test_spread_is_the_median_between_the_extremes() -> None:
    spread = Spread.of([3.0, 1.0, 2.0, 10.0])
    assert (spread.median, spread.low, spread.high, spread.count) == (2.5, 1.0, 10.0, 4)
    assert spread.text(1) == "2.5 [1.0 10.0]"


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_ratios_are_taken_pair_by_pair() -> None:
    assert ratios([4.0, 9.0], [2.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])


def test_a_table_starts_with_the_machine_line() -> None:
    table = Table("Title", MACHINE, ["name", "value"])
    table.add("a", 1)
    table.add("longer", 22)
    table.notes.append("A note.")
    lines = table.markdown().splitlines()
    assert lines[0] == MACHINE.line
    assert lines[2] == "**Title**"
    assert lines[4:8] == [
        "| name   | value |",
        "| ------ | ----: |",
        "| a      |     1 |",
        "| longer |    22 |",
    ]
    assert lines[-1] == "A note."


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table("t", MACHINE, ["a", "b"]).add("x")


def test_the_machine_line_names_everything_and_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    machine = describe_machine(dtype="bfloat16", model=str(folder))
    for part in (machine.date, machine.cpu, "cores", "torch", "transformers", "dtype bfloat16", "model some-model"):
        assert part in machine.line
    assert str(tmp_path) not in machine.line


def test_the_cpu_name_comes_from_cpuinfo(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_model(file) == "Some CPU @ 2 GHz"
    file.write_text(f"{file.read_text()}flags\t: fpu avx avx2 avx512f amx_tile amx_bf16\n")
    assert cpu_model(file) == "Some CPU @ 2 GHz (avx2, avx512f, amx_bf16)"
    assert cpu_model(tmp_path / "missing")
