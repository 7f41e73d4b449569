"""How things are shown."""

from __future__ import annotations

import io
import sys

import pytest

from kvboost.cli import output
from kvboost.cli.output import age, progress, size


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("quiet", "shown"), [(0.0, True), (60.0, False)])
def test_a_bar_is_shown_for_what_takes_long(monkeypatch: pytest.MonkeyPatch, quiet: float, shown: bool) -> None:
    terminal = Terminal()
    monkeypatch.setattr(output, "_DELAY_S", quiet)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert list(progress("checking", iter("abc"), total=3)) == ["a", "b", "c"]
    assert ("checking" in terminal.getvalue()) is shown
    assert ("/3" in terminal.getvalue()) is shown


def test_a_bar_is_not_shown_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(output, "_DELAY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", file)
    with progress("checking") as bar:
        bar.update()
    assert file.getvalue() == ""


def test_sizes_and_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.time, "time", lambda: 100_000.0)
    assert [size(n) for n in (0, 1023, 1024, 3 * 2**30, 2**42)] == ["0 B", "1023 B", "1.0 KiB", "3.0 GiB", "4.0 TiB"]
    assert [age(at) for at in (None, 99_990.0, 99_000.0, 90_000.0, 0.0, 200_000.0)] == [
        "?",
        "10 s",
        "17 min",
        "3 h",
        "1 d",
        "0 s",
    ]
