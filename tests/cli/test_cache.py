"""``kvboost cache`` over a directory and a real Redis."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.servers import free_port
from kvboost.cli import main
from kvboost.store.record.format import RecordFormat, record_format
from kvboost.types import tenant_digest
from tests.helpers.places import Place, blocks_of, of

ACME, NOBODY = RecordFormat(of("model", "acme")), RecordFormat(of("model"))
SECRET = record_format(of("model", "secret"), codec="raw", max_bytes=2**20, protection="encrypt", key=b"e" * 32)


class Said:
    """Runs commands and keeps what they said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._capsys.readouterr()
        code = main(["cache", *map(str, arguments)])
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.err
        return code

    def json(self, *arguments: object, code: int = 0) -> Any:
        assert self(*arguments, "--json") == code, self.err
        return json.loads(self.out)


@pytest.fixture
def kvboost(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


@pytest.fixture
def filled(place: Place) -> Place:
    place.fill(ACME, blocks_of("a", "b", "c"))
    place.fill(NOBODY, blocks_of("x", "y"))
    return place


def test_stat_counts_by_space(filled: Place, kvboost: Said) -> None:
    told = kvboost.json("stat", filled.url)
    assert told["records"] == 5
    assert told["bytes"] == sum(row["bytes"] for row in told["spaces"])
    spaces = {row["space"]: row for row in told["spaces"]}
    assert spaces[ACME.space.hex()]["records"] == 3
    assert spaces[ACME.space.hex()]["model"] == ACME.namespace.root.hex()
    assert spaces[NOBODY.space.hex()]["tenant"] == tenant_digest("").hex()
    assert kvboost("stat", filled.url) == 0
    assert kvboost.out.splitlines()[-1].startswith("5 records, ")


def test_verify_finds_a_damaged_record(filled: Place, kvboost: Said) -> None:
    assert kvboost("verify", filled.url) == 0
    assert kvboost.out == "5 whole\n"
    for arguments, count in (
        (["--tenant", "acme"], 3),
        (["--tenant", "other"], 0),
        (["--space", NOBODY.space.hex()], 2),
    ):
        assert kvboost.json("verify", filled.url, *arguments)["whole"] == count
    broken = blocks_of("x")[0].key
    filled.change(NOBODY, broken)
    assert kvboost("verify", filled.url) == 1
    first, last = kvboost.out.splitlines()
    assert first.startswith(broken.hex()[:12])
    assert last == "4 whole, 1 damaged"
    told = kvboost.json("verify", filled.url, "--remove", code=1)
    assert (told["whole"], told["damaged"], told["removed"]) == (4, 1, 1)
    assert told["damage"][0]["key"] == broken.hex()
    assert kvboost("verify", filled.url) == 0
    assert kvboost.out == "4 whole\n"


def test_purge(filled: Place, kvboost: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    space = NOBODY.space.hex()
    for arguments in (["--tenant", "acme", "--space", space], ["--all", "--space", space], []):
        assert kvboost("purge", filled.url, *arguments, "--yes") == 2
        assert "say what to remove" in kvboost.err
    for arguments in (["--space", space], ["--tenant", "acme"], ["--all"]):
        assert kvboost("purge", filled.url, *arguments) == 2
        assert "--yes" in kvboost.err
    assert kvboost.json("stat", filled.url)["records"] == 5, "something went without a yes"
    assert kvboost.json("purge", filled.url, "--space", space[:6], "--yes") == {"removed": 2}
    assert kvboost.json("purge", filled.url, "--tenant", "other", "--yes") == {"removed": 0}
    assert kvboost.json("purge", filled.url, "--tenant", "acme", "-y") == {"removed": 3}
    assert kvboost.json("stat", filled.url)["records"] == 0


def test_records_with_a_secret(kvboost: Said, tmp_path: Path) -> None:
    place = Place("disk", str(tmp_path / "s"))
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    key.write_text((b"e" * 32).hex() + "\n")
    wrong.write_bytes(b"w" * 32)
    key.chmod(0o600)
    wrong.chmod(0o600)
    place.fill(SECRET, blocks_of("a", "b"))
    assert kvboost("verify", place.url) == 0
    assert kvboost.out == "2 locked\n"
    assert "--key-file" in kvboost.err
    (space,) = kvboost.json("stat", place.url)["spaces"]
    assert (space["sealed"], space["encrypted"]) == (True, True)
    assert kvboost.json("verify", place.url, "--key-file", wrong)["locked"] == 2
    assert kvboost.json("verify", place.url, "--key-file", wrong, "--key-file", key)["whole"] == 2
    key.write_bytes(b"short")
    assert kvboost("verify", place.url, "--key-file", key) == 2
    assert kvboost("verify", place.url, "--key-file", tmp_path / "absent") == 2
    assert "--key-file" in kvboost.err
    assert "record_key_file" not in kvboost.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stat", "{tmp}"], "is no cache directory"),
        (["stat", "{tmp}/none"], "there is no directory"),
        (["verify", "redis://:secret@127.0.0.1:{port}/0"], "check that it runs"),
        (["verify", "ftp://host/x"], "give a cache directory, redis://HOST:PORT"),
        (["stat", "{tmp}/file"], "is no directory"),
        (["purge", "{cache}", "--space", "abc"], "4 hexadecimal digits"),
        (["verify", "{cache}", "--space", "ffff"], "no space begins with ffff"),
        (["purge", "{cache}"], "say what to remove: --tenant NAME, --space HEX, or --all"),
    ],
)
def test_a_mistake_is_one_line(kvboost: Said, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "file").write_text("x")
    cache = Place("disk", str(tmp_path / "cache"))
    cache.fill(ACME, blocks_of("a"))
    names = {"tmp": str(tmp_path), "cache": cache.url, "port": str(free_port())}
    assert kvboost(*(part.format(**names) for part in arguments)) == 2
    assert len(kvboost.err.strip().splitlines()) == 1
    assert kvboost.err.startswith(f"kvboost cache {arguments[0]}: ")
    assert message in kvboost.err
    assert "secret" not in kvboost.err


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_in_a_process_of_its_own(filled: Place) -> None:
    filled.change(ACME, blocks_of("a")[0].key)
    command = [sys.executable, "-m", "kvboost", "cache", "verify", filled.url, "--json"]
    verified = subprocess.run(command, capture_output=True, env=dict(os.environ), timeout=120)
    assert verified.returncode == 1
    assert json.loads(verified.stdout)["damaged"] == 1
