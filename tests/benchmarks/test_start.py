"""The start benchmark, with processes that say what they took."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.exact import start
from benchmarks.runner import main


@pytest.mark.parametrize(("second", "verdict"), [(1.4, 0), (1.6, 1)])
def test_a_second_start_has_a_bar(second: float, verdict: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    took = iter([1.0, 9.0, second] * 3)
    monkeypatch.setattr(start, "_start", lambda *_: (next(took), 1.0))
    assert main(["start", "--model", str(tmp_path), "--dtype", "float32", "--repeat", "2"]) == verdict


def test_a_second_start_that_keeps_something_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    made = iter(range(99))

    def keep(*given: object) -> tuple[float, float]:
        (Path(str(given[-1])) / str(next(made))).write_text("")
        return 1.0, 1.0

    monkeypatch.setattr(start, "_start", keep)
    assert main(["start", "--model", str(tmp_path)]) == 2
    assert "had not kept all" in capsys.readouterr().err
