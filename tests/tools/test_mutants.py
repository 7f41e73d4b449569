from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import PACKAGES, ROOT, outcome, results, sample, table

_CODES = {
    "kvboost.core.keys.x_paged_key__mutmut_1": 1,
    "kvboost.core.keys.x_paged_key__mutmut_2": 0,
    "kvboost.core.keys.x_paged_key__mutmut_3": -24,
    "kvboost.core.plan.x_plan_reuse__mutmut_1": None,
    "kvboost.store.record.format.x__crc32__mutmut_1": 33,
}


def test_a_crash_is_noticed_and_a_mutant_without_a_test_is_not() -> None:
    assert [outcome(code) for code in (1, 3, -11, 0, 33, 36, None)] == [
        "killed",
        "killed",
        "killed",
        "survived",
        "no test",
        "timed out",
        "not run",
    ]


def test_results_of_all_files_are_read(tmp_path: Path) -> None:
    for number, (name, code) in enumerate(_CODES.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "module.py.meta").write_text(json.dumps({"exit_code_by_key": {name: code}}))
    assert results(tmp_path) == _CODES


def test_the_table_counts_by_package_and_shares_by_what_was_run() -> None:
    lines = table(_CODES).splitlines()
    assert lines[2] == "| `core` | 4 | 1 | 1 | 1 | 0 | 1 | 33.3% |"
    assert lines[3] == "| `store.record` | 1 | 0 | 0 | 0 | 1 | 0 | 0.0% |"
    assert lines[4] == "| `store.tiers.disk` | 0 | 0 | 0 | 0 | 0 | 0 | - |"
    assert lines[-1] == "| all | 5 | 1 | 1 | 1 | 1 | 1 | 25.0% |"


def test_a_sample_is_the_same_each_time_and_of_every_package() -> None:
    codes = {f"kvboost.{package}.module.x_f__mutmut_{number}": None for package in PACKAGES for number in range(20)}
    chosen = sample(codes, 5)
    assert chosen == sample(dict(reversed(codes.items())), 5)
    assert [sum(name.startswith(f"kvboost.{package}.") for name in chosen) for package in PACKAGES] == [5, 5, 5, 5]
    assert set(chosen) < set(sample(codes, 7))
    assert sorted(sample(codes, 100)) == sorted(codes)


def test_the_table_has_every_package_that_is_mutated_and_every_test_is_there() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    assert settings["only_mutate"] == [f"src/kvboost/{package.replace('.', '/')}/*" for package in PACKAGES]
    for path in settings["pytest_add_cli_args_test_selection"]:
        assert (ROOT / path).exists()


def test_without_mutmut_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "_PROGRAM", tmp_path / "mutmut")
    with pytest.raises(SystemExit):
        mutants.main(["run"])
    assert 'pip install -e ".[dev,mutation]"' in capsys.readouterr().err
