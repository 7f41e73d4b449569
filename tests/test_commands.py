"""Every ``kvboost`` and ``python -m benchmarks`` command in the documents names a command and options that exist."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main

from benchmarks.runner import find_benchmarks
from kvboost.cli.main import app

_ROOT = Path(__file__).resolve().parents[1]
_FENCED = re.compile(r"^ *```(?:bash|console|sh)\n(.*?)^ *```", re.M | re.S)
_INLINE = re.compile(r"`((?:kvboost|python -m benchmarks) [^`\n]+)`")
_COMMAND = re.compile(r"(?:^|(?<!--model)[\s/(])(kvboost|python -m benchmarks) (.+)")
_OPTION = re.compile(r"--[a-z][\w-]*")
_OF_THE_RUNNER = {"--quick", "--list", "--json", "--markdown", "--help"}
_ANY_NAME = {"NAME", "all", "COMMAND", "..."}  # as in "python -m benchmarks NAME"


def commands_of(text: str) -> list[tuple[str, list[str]]]:
    """The program and its words, for each command of a page."""
    lines = [line for block in _FENCED.findall(text) for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    found = [_COMMAND.search(line.partition(" #")[0]) for line in (*lines, *_INLINE.findall(text))]
    return [(match[1], match[2].split()) for match in found if match is not None]


def fault_of(program: str, words: list[str]) -> str | None:
    """What a command names that does not exist; None if there is nothing."""
    options = _OPTION.findall(" ".join(words))
    if program == "kvboost":
        command: Any = typer.main.get_command(app)
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        for word in words:
            if not (nested := getattr(command, "commands", {})):
                break
            if word in _ANY_NAME:
                return None
            if not word.startswith("-"):
                if word not in nested and command.name != "bench":  # `bench MODEL` is `bench run MODEL`
                    return f"there is no command {word!r}"
                command = nested.get(word) or nested["run"]
                known |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    else:
        if words[0].startswith("--") or words[0] in _ANY_NAME:
            return None
        if words[0] not in find_benchmarks():
            return f"there is no benchmark {words[0]!r}"
        parser = argparse.ArgumentParser()
        importlib.import_module(find_benchmarks()[words[0]]).add_arguments(parser)
        known = _OF_THE_RUNNER | {name for action in parser._actions for name in action.option_strings}
    return next((f"there is no option {option}" for option in options if option not in known), None)


def _pages() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=_ROOT, capture_output=True, text=True, check=False)
    pages = listed.stdout.split() or [str(path.relative_to(_ROOT)) for path in _ROOT.rglob("*.md")]
    return sorted(page for page in pages if page != "CHANGELOG.md" and commands_of((_ROOT / page).read_text()))


@pytest.mark.parametrize("page", _pages())
def test_commands_of_the_documents_exist(page: str) -> None:
    faults = [
        f"{program} {' '.join(words)}: {fault}"
        for program, words in commands_of((_ROOT / page).read_text())
        if (fault := fault_of(program, words)) is not None
    ]
    assert not faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`kvboost sevre MODEL`", "there is no command 'sevre'"),
        ("```bash\nkvboost serve MODEL \\\n  --prot 8000\n```", "there is no option --prot"),
        ("`kvboost bench mine MODEL --promtps FILE`", "there is no option --promtps"),
        ("`kvboost bench MODEL --tokens 400`", None),
        ("`python -m benchmarks tftt`", "there is no benchmark 'tftt'"),
        ("```console\n$ python -m benchmarks disk_kills --kill 3\n```", "there is no option --kill"),
        ("`python -m benchmarks disk_kills --kills 3`", None),
    ],
)
def test_what_does_not_exist_is_named(text: str, fault: str | None) -> None:
    ((program, words),) = commands_of(text)
    assert fault_of(program, words) == fault
