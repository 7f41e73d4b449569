from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import kvboost
from kvboost.approx import comparisons as calibration
from kvboost.cli import main
from kvboost.cli.main import app
from kvboost.cli.output import log_with_time, logging_to_stderr, note_with_time, set_level
from kvboost.store.tiers.disk.files import Files
from tests.approx.test_comparisons import traffic
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer


def test_doctor_says_what_a_model_allows(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", str(folder), "--quality", "high"]) == 0
    said = capsys.readouterr().out
    assert "exact reuse         on" in said
    assert "non-prefix reuse    on: auto" in said
    tiny_model("gpt2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path), "--quality", "high"]) == 0
    said = capsys.readouterr().out
    assert "non-prefix reuse    off: gpt2" in said


def test_calibrate_writes_a_file_an_engine_takes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "RATIOS", (0.5, 1.0))
    prompts = tmp_path / "traffic.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": tokens}) for tokens in traffic(30, length=420)) + "\n\n")
    out = tmp_path / "c.json"
    code = main(["calibrate", str(folder), "--prompts", str(prompts), "--tolerated", "0.5", "--out", str(out)])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert re.search(r"quality=0.5 recomputes \d+% of the tokens \(strategy '\w+'\)", said.out)
    assert json.loads(out.read_text())["format"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "MODEL", "--prompts", "absent.txt"], "cannot be read"),
        (["calibrate", "MODEL", "--prompts", "EMPTY"], "is empty"),
        (["calibrate", "MODEL", "--prompts", "TEXT", "--tolerated", "5"], "not a share"),
        (["calibrate", "MODEL", "--prompts", "TEXT", "--out", "no/such/c.json"], "create it first"),
        (["calibrate", "MODEL", "--prompts", "TEXT"], "has 2 prompts, and more than 10 are needed"),
        (["doctor", "nowhere-at-all"], "nowhere-at-all"),
        (["calibrate"], "Missing argument 'MODEL'. Try 'kvboost calibrate --help'."),
        (["doctor", "MODEL", "--fast"], "No such option: --fast"),
        (["nothing"], "No such command 'nothing'. Try 'kvboost --help'."),
        (["serv"], "Did you mean 'serve'? Try 'kvboost --help'."),
        (["cache"], "Missing command. Try 'kvboost cache --help'."),
        (["cache", "stat", "absent"], "there is no directory absent"),
        (["cache", "stat", "EMPTY"], "no directory"),
        (["warm", "MODEL", "TEXT"], "give --disk-cache-dir or --remote-url"),
        (["warm", "MODEL", "TEXT", "--disk-cache-dir", "CACHE"], "add --quality auto"),
        (["warm", "MODEL", "absent.txt", "--disk-cache-dir", "CACHE"], "there is no absent.txt"),
        (["warm", "MODEL", "CACHE", "--disk-cache-dir", "CACHE"], "holds no *.txt"),
        (["doctor", "MODEL", "--quality", "best"], "quality='best' is not known"),
        (["doctor", "MODEL", "--kv-cache-bits", "5"], "use 16, 8 or 4"),
        (["doctor", "MODEL", "--config", "absent.toml"], "there is no absent.toml; give a TOML file"),
        (["map", "no-such-model", "PROMPTS", "ANSWERS", "--disk-cache-dir", "TEXT"], "is no directory"),
        (
            ["run", "MODEL", "hello"],
            "No such command 'run'. To ask a model, open the page of 'kvboost serve MODEL', or",
        ),
        (["--log-level", "info", "chat", "MODEL"], "No such command 'chat'. To ask a model, open the page of"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "text").write_text("one prompt\nanother prompt\n")
    (tmp_path / "prompts").write_text('{"prompt": "x"}\n')
    (tmp_path / "cache").mkdir()
    names: dict[str, Any] = {"MODEL": folder, "EMPTY": tmp_path / "empty", "TEXT": tmp_path / "text"}
    names |= {name: tmp_path / name.lower() for name in ("CACHE", "PROMPTS", "ANSWERS")}
    assert main([str(names.get(part, part)) for part in arguments]) == 2
    said = capsys.readouterr().err
    last = said.strip().splitlines()[-1]
    assert last.startswith(("kvboost ", "kvboost: "))
    assert message in last
    assert "Traceback" not in said


def test_what_an_unknown_command_names_instead_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(folder), "hello"]) == 2
    code = capsys.readouterr().err.rpartition("python -c '")[2].rpartition("'")[0]
    exec(code.replace("MODEL", str(folder)), {})
    assert "PROMPT" not in (said := capsys.readouterr().out)
    assert "first token after" in said


def test_warm_reads_directories_and_goes_on_where_it_stopped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = tmp_path / "documents"
    (documents / "more").mkdir(parents=True)
    for number in range(3):
        (documents / f"{number}.txt").write_text(f"document {number} " * 30)
    call = ["warm", str(folder), str(documents), "--disk-cache-dir", str(tmp_path / "cache"), "--quality", "high"]
    assert main(call) == 0
    first = capsys.readouterr().out
    assert first.startswith("3 documents with ")
    assert not first.endswith(" 0 chunks were new.\n")
    assert main(call) == 0
    assert capsys.readouterr().out.endswith(" 0 chunks were new.\n")
    (documents / "more" / "new.md").write_text("quite another document " * 20)
    (documents / "more" / "long.md").write_text("far too long " * 400)
    assert main(call) == 0
    said = capsys.readouterr()
    assert said.out.startswith("4 documents with ")
    assert not said.out.endswith(" 0 chunks were new.\n")
    assert "left out" in said.err
    assert "long.md" in said.err


def test_every_command_has_a_help_that_teaches() -> None:
    def commands(group: Any, path: list[str]) -> list[list[str]]:
        inner = getattr(group, "commands", None)
        return [path] if inner is None else [p for name, c in inner.items() for p in commands(c, [*path, name])]

    paths = commands(typer.main.get_command(app), [])
    assert len(paths) == 11
    for path in paths:
        shown = CliRunner().invoke(app, [*path, "--help"], prog_name="kvboost", env={"COLUMNS": "200"})
        assert shown.exit_code == 0, shown.output
        assert f"Example:  kvboost {' '.join(path)} " in shown.output


def test_nothing_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out


def _subprocess(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


def test_the_module_is_the_command(folder: Path) -> None:
    done = _subprocess("-m", "kvboost", "doctor", str(folder))
    assert done.returncode == 0, done.stderr
    assert "exact reuse         on" in done.stdout
    wrong = _subprocess("-m", "kvboost", "doctor", "--batch", "0")
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


def test_help_and_completion_wait_for_no_torch() -> None:
    code = (
        "import sys, kvboost.cli\n"
        "code = kvboost.cli.main(['--help'])\n"
        "print(code, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = _subprocess("-c", code)
    assert done.stdout.endswith("0 []\n"), done.stderr
    asked = {"_KVBOOST_COMPLETE": "complete_bash", "COMP_WORDS": "kvboost cache ve", "COMP_CWORD": "2"}
    done = _subprocess("-m", "kvboost", **asked)
    assert done.stdout.split() == ["verify"], done.stderr


def test_the_package_still_offers_its_names() -> None:
    for name in kvboost.__all__:
        assert getattr(kvboost, name).__name__ == name
        assert name in dir(kvboost)
    with pytest.raises(AttributeError, match="no attribute 'KVBost'"):
        kvboost.KVBost  # noqa: B018


def test_warm_into_a_place_that_keeps_nothing_fails_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("a document " * 30)
    call = ["warm", str(folder), str(tmp_path / "text"), "--quality", "high"]
    assert main([*call, "--disk-cache-dir", "/proc/kv"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("kvboost warm: /proc/kv cannot be used")
    assert main([*call, "--remote-url", "redis://127.0.0.1:1/0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "redis://127.0.0.1:1/0 cannot be used" in line


def test_warm_says_so_if_the_place_fails_on_the_way(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    (tmp_path / "text").write_text("a document " * 30)
    monkeypatch.setattr(Files, "_writev", full)
    call = ["warm", str(folder), str(tmp_path / "text"), "--quality", "high"]
    assert main([*call, "--disk-cache-dir", str(tmp_path / "cache")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "warning: disk tier: the directory cannot be used: [Errno 28] No space left" in said.err
    assert said.err.splitlines()[-1].startswith("kvboost warm: ")
    assert "new chunks were not stored" in said.err.splitlines()[-1]


@pytest.mark.parametrize("place", [["--disk-cache-dir", "/proc/kv"], ["--remote-url", "redis://127.0.0.1:1/0"]])
def test_map_goes_on_without_a_place_and_says_so_once(
    place: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text('{"prompt": "hello", "max_tokens": 1}\n')
    assert main(["map", str(folder), str(tmp_path / "prompts"), str(tmp_path / "answers"), *place]) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1
    assert " tier: " in warned[0]
    assert "cannot be used" in warned[0]


def test_warnings_are_log_lines_and_none_is_silenced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")

    def shown(level: str | None) -> list[str]:
        with logging_to_stderr():
            set_level(level)
            warnings.warn("the disk\nis full", RuntimeWarning, stacklevel=1)
            warnings.warn("use_cache will go", FutureWarning, stacklevel=1)
            logging.getLogger("kvboost.serve").info("a request")
            logging.getLogger("kvboost.store").info("a detail")
        return capsys.readouterr().err.splitlines()

    assert shown(None) == ["warning: the disk is full", "info: a request"]
    everything = ["warning: the disk is full", "info: use_cache will go", "info: a request", "info: a detail"]
    assert shown("info") == everything
    assert shown("warning") == ["warning: the disk is full"]
    assert shown("error") == []
    assert not logging.getLogger("kvboost").handlers
    assert main(["doctor", "nowhere", "--log-level", "loud"]) == 2
    assert "--log-level loud is not known; use one of debug, info" in capsys.readouterr().err


def test_each_line_of_a_server_carries_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("a library with a handler of its own")
    library.addHandler(logging.StreamHandler())
    with logging_to_stderr():
        log_with_time()
        log_with_time(library.name)
        note_with_time("loading")
        logging.getLogger("kvboost.serve").info("a request")
        logging.getLogger("uvicorn.error").error("an answer failed")
        logging.getLogger("asyncio").error("a task failed")
        library.warning("something is deprecated")
        warnings.warn("the disk is full", RuntimeWarning, stacklevel=1)
    lines = [line.partition(" ") for line in capsys.readouterr().err.splitlines()]
    assert [words for _, _, words in lines] == [
        "loading",
        "info: a request",
        "error: an answer failed",
        "error: a task failed",
        "warning: something is deprecated",
        "warning: the disk is full",
    ]
    for moment, _, _ in lines:
        assert abs(datetime.now(UTC) - datetime.fromisoformat(moment)) < timedelta(minutes=1)


def test_other_libraries_details_are_for_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    for level, others in (("info", "warning"), ("debug", "debug"), ("error", "error")):
        monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "")
        monkeypatch.delenv("TRANSFORMERS_VERBOSITY")
        with logging_to_stderr():
            set_level(level)
        assert os.environ["TRANSFORMERS_VERBOSITY"] == others


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvboost {kvboost.__version__}\n"
