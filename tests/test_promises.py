"""Every promise of docs/promises.md names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_ROWS = re.findall(r"^\| (.+?) \| `(tests/[^`]+)` \|$", (_ROOT / "docs" / "promises.md").read_text(), re.MULTILINE)


def _tests_of(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("promise", "test"), _ROWS, ids=[test for _, test in _ROWS])
def test_the_test_of_a_promise_exists(promise: str, test: str) -> None:
    path, _, name = test.partition("::")
    assert name.startswith("test_")
    assert name in _tests_of(_ROOT / path), f"{promise}: {path} has no {name}"


def test_every_row_of_the_page_is_read() -> None:
    """A row in another form would be checked by nobody."""
    page = (_ROOT / "docs" / "promises.md").read_text()
    assert page.count("| `tests/") == len(_ROWS) > 40
