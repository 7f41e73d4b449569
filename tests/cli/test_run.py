"""``kvboost run`` on a tiny model: answers, reuse from a directory, settings from outside."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvboost.cli import main
from kvboost.cli.run import reuse_line
from kvboost.types import GenerationResult, ReuseReport

LONG = "a long question about the moon and the sun and everything else " * 8
REUSE = re.compile(
    r"\[(\d+) prompt tokens: (\d+) exact, (\d+) non-prefix, (\d+) recomputed, (\d+) fresh .*first token after"
)


def reuse(said: str) -> list[list[int]]:
    return [[int(number) for number in match.groups()] for match in REUSE.finditer(said)]


def test_run_answers_and_the_next_one_finds_what_it_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ["run", str(folder), LONG, "--max-new-tokens", "4", "--disk-cache-dir", str(tmp_path / "cache")]
    assert main(call) == 0
    cold = capsys.readouterr()
    ((tokens, exact, _, _, fresh),) = reuse(cold.err)
    assert (exact, fresh) == (0, tokens)
    monkeypatch.setattr(sys, "stdin", io.StringIO(LONG))
    assert main([*call[:2], "-", *call[3:]]) == 0
    warm = capsys.readouterr()
    ((_, exact, _, _, _),) = reuse(warm.err)
    assert exact > 0.8 * tokens
    assert warm.out == cold.out
    assert main([*call, "--tenant", "other"]) == 0
    assert reuse(capsys.readouterr().err)[0][1] == 0


def test_raw_text_has_no_template(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(folder), "abc", "--raw", "--max-new-tokens", "1"]) == 0
    assert reuse(capsys.readouterr().err)[0][0] == 3
    assert main(["run", str(folder), "abc", "--max-new-tokens", "1"]) == 0
    assert reuse(capsys.readouterr().err)[0][0] == len("<user>abc\n<assistant>")


def test_a_run_in_a_process_of_its_own_with_settings_from_outside(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "kvboost.toml"
    config.write_text(f'disk_cache_dir = "{tmp_path / "cache"}"\n')
    monkeypatch.setenv("KVBOOST_CONFIG", str(config))
    monkeypatch.setenv("KVBOOST_TENANT", "acme")
    assert main(["run", str(folder), LONG, "--show-config"]) == 0
    shown = capsys.readouterr().out
    assert f'disk_cache_dir = "{tmp_path / "cache"}"  # {config}' in shown
    assert 'tenant = "acme"  # KVBOOST_TENANT' in shown

    command = [sys.executable, "-m", "kvboost", "run", str(folder), "-", "--max-new-tokens", "4"]
    done = subprocess.run(command, input=LONG, capture_output=True, text=True, env=dict(os.environ), timeout=120)
    assert done.returncode == 0, done.stderr
    assert reuse(done.stderr)[0][1] == 0

    def again() -> int:
        assert main(["run", str(folder), LONG, "--max-new-tokens", "4"]) == 0
        said = capsys.readouterr()
        assert said.out == done.stdout
        return reuse(said.err)[0][1]

    assert again() > 400, "the directory kept nothing"
    # What the engine stored for this tenant, the cache command finds by its name.
    assert main(["cache", "purge", str(tmp_path / "cache"), "--tenant", "other", "--yes"]) == 0
    assert capsys.readouterr().out == "0 records removed\n"
    assert main(["cache", "purge", str(tmp_path / "cache"), "--tenant", "acme", "--yes", "--json"]) == 0
    assert re.fullmatch(r'\{"removed": [1-9]\d*\}\n', capsys.readouterr().out)
    assert again() == 0


def test_a_system_message_comes_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(folder), "abc", "--system", "be brief", "--max-new-tokens", "1"]) == 0
    assert reuse(capsys.readouterr().err)[0][0] == len("<system>be brief\n<user>abc\n<assistant>")


def test_the_line_about_reuse_names_what_stood_in_the_way() -> None:
    report = ReuseReport(1, 2, 3, 4, bitwise=False, reason="the model is odd")
    result = GenerationResult("", (1, 2), tuple(range(10)), "stop", 12.3, 1000.0, report)
    assert reuse_line(result) == (
        "[10 prompt tokens: 1 exact, 2 non-prefix, 3 recomputed, 4 fresh (approximate); "
        "first token after 12 ms, 2 new ones at 2.0/s; the model is odd]"
    )
