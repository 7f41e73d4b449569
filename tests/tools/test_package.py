from __future__ import annotations

import re

import pytest

from tools import package

_WHEEL = [*package._NEEDED_IN_WHEEL, "kvboost-1.0.dist-info/METADATA"]
_SDIST = [*package._NEEDED_IN_SDIST, "src/kvboost/__init__.py"]


def test_packages_that_have_what_they_need_pass() -> None:
    assert package.wheel_faults(_WHEEL) == []
    assert package.sdist_faults(_SDIST) == []


@pytest.mark.parametrize("name", ["tests/test_a.py", "benchmarks/run.py", "tools/site.py", "kvboost/__pycache__/a.pyc"])
def test_what_does_not_belong_into_a_wheel_is_named(name: str) -> None:
    assert any(name in fault for fault in package.wheel_faults([*_WHEEL, name]))


def test_what_is_missing_is_named() -> None:
    assert package.wheel_faults(_WHEEL[1:]) == ["the wheel lacks kvboost/__init__.py"]
    assert package.sdist_faults(_SDIST[1:-1]) == ["the source package lacks src"]
    assert package.sdist_faults([*_SDIST, "dist/kvboost.whl"]) == ["dist/kvboost.whl is junk"]


def test_a_package_that_grew_too_large_is_told_where() -> None:
    lines = {"serve/app.py": 30_000, "cli/main.py": 10_000, "cli/serve.py": 5_000}
    assert package.size_faults(lines) == []
    (fault,) = package.size_faults(lines | {"types.py": 1})
    assert "45,001 lines" in fault
    assert "serve 30,000, cli 15,000" in fault


def test_another_tag_builds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert package.main(["--tag", "v0.0.1"]) == 1
    assert "v0.0.1" in capsys.readouterr().err


def test_the_version_stands_in_one_place_and_others_follow() -> None:
    """CITATION.cff and the changelog cannot read it: they are compared."""
    assert "version" not in re.findall(r"^(\w+) = ", (package.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"\nversion: {package.version()}\n" in (package.ROOT / "CITATION.cff").read_text()
    assert f"\n## [{package.version()}] - " in (package.ROOT / "CHANGELOG.md").read_text()
