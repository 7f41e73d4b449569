"""How far a benchmark is."""

from __future__ import annotations

import pytest

from benchmarks.common.report import Progress


def test_progress_is_silent_at_first_and_speaks_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("benchmarks.common.report.time.perf_counter", lambda: now)
    progress = Progress("things", 10)
    now += 1.9
    progress.step()
    assert capsys.readouterr() == ("", "")
    now += 0.2
    progress.step(2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "things: 3 of 10, 2 s, about 5 s left\n"
    progress.leave(4)
    now += 2.1
    progress.step()
    assert capsys.readouterr().err == "things: 4 of 6, 4 s, about 2 s left\n"
