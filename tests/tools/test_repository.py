"""Files that GitHub reads: they parse, ask for few rights, and call what is there. actionlint runs in the workflow."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

yaml: Any = pytest.importorskip("yaml")

_ROOT = Path(__file__).resolve().parents[2]
_MOST_LINES = 45_900
_WORKFLOWS = sorted((_ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", _WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_asks_for_few_rights_and_calls_what_is_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True]  # YAML's own reading of "on"
    for job in workflow["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest"
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "${{" not in step.get("run", ""), "text of others in a shell; hand it over in env"
            for module in re.findall(r"python -m (tools\.\w+)", step.get("run", "")):
                assert (_ROOT / (module.replace(".", "/") + ".py")).is_file()
            if step.get("run", "").startswith(".ci/"):
                assert (_ROOT / step["run"]).is_file()


def test_only_publishing_gets_an_identity_and_no_workflow_has_a_secret() -> None:
    for path in _WORKFLOWS:
        assert "secrets." not in path.read_text()
        jobs = yaml.safe_load(path.read_text())["jobs"]
        trusted = {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})}
        assert trusted == {"publish": {"publish"}, "docs": {"deploy"}}.get(path.stem, set())


@pytest.mark.parametrize(
    "path", sorted((_ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_a_template_has_what_github_needs(path: Path) -> None:
    template = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert template == {"blank_issues_enabled": False}
        return
    assert template["name"]
    assert template["description"]
    assert all(field["attributes"]["label"] for field in template["body"])


def test_the_citation_has_what_its_schema_needs() -> None:
    citation = yaml.safe_load((_ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_the_wheel_does_not_grow() -> None:
    files = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in (_ROOT / "src").rglob("*.py")}
    largest = ", ".join(str(file.relative_to(_ROOT)) for file in sorted(files, key=files.__getitem__)[-5:])
    assert sum(files.values()) <= _MOST_LINES, (
        "the wheel has grown: delete what the change made useless, merge what says the same twice, or move what only "
        f"maintainers use to benchmarks/, tools/ or tests/; the largest files are {largest}"
    )


def test_no_function_on_the_path_of_a_request_takes_more_than_six_arguments() -> None:
    found = []
    for room in ("core", "engine"):
        for file in (_ROOT / "src/kvboost" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    given = node.args
                    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                    if len(names) - (names[:1] in (["self"], ["cls"])) > 6:
                        found.append(f"{file.relative_to(_ROOT)}: {node.name}")
    assert found == [], "put what belongs together into one argument"
