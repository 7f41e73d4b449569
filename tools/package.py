"""Builds the packages and checks them: ``python -m tools.package`` writes to dist/. Needs the extra ``release``.

The wheel has the package and nothing else, in at most 45,000 lines; the source package everything that its tests need.
With ``--tag v1.2.3`` the version must be that tag's. Prints what is in them.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
_NEEDED_IN_WHEEL = ("kvboost/__init__.py", "kvboost/py.typed", "kvboost/extend.py", "kvboost/serve/ui/page.html")
_NEEDED_IN_SDIST = (
    *("src", "tests", "benchmarks", "docs", "examples", "tools"),
    *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"),
)
MAX_LINES = 45_000  # of Python in the wheel: each has a reader
_JUNK = re.compile(r"(^|/)(__pycache__|\.git|\.ci|build|dist|kv-cache|\.venv)(/|$)|\.pyc$")


def version() -> str:
    """The version, from the one place where it stands."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/kvboost/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def wheel_faults(names: Sequence[str]) -> list[str]:
    """What is wrong with the files of a wheel."""
    faults = [
        f"{name} does not belong into the wheel"
        for name in names
        if not re.match(r"kvboost(-[^/]+\.dist-info)?/", name)
    ]
    faults += [f"{name} is junk" for name in names if _JUNK.search(name)]
    return faults + [f"the wheel lacks {name}" for name in _NEEDED_IN_WHEEL if name not in names]


def size_faults(lines: Mapping[str, int]) -> list[str]:
    """What to do if the files of the package, with their numbers of lines, are more than anybody wants to read."""
    total = sum(lines.values())
    if total <= MAX_LINES:
        return []
    rooms: Counter[str] = Counter()
    for name, count in lines.items():
        rooms[name.split("/")[0]] += count
    largest = ", ".join(f"{room} {count:,}" for room, count in rooms.most_common(5))
    return [
        f"the package has {total:,} lines of {MAX_LINES:,}: delete a feature that nobody would miss, or move what only "
        f"maintainers run to benchmarks/, tools/ or tests/. The most lines are in {largest}"
    ]


def sdist_faults(names: Sequence[str]) -> list[str]:
    """What is wrong with the files of a source package, given without its leading folder."""
    tops = {name.split("/")[0] for name in names}
    faults = [f"{name} is junk" for name in names if _JUNK.search(name)]
    return faults + [f"the source package lacks {name}" for name in _NEEDED_IN_SDIST if name not in tops]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and check; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="the release's tag, such as v1.0.0")
    tag = parser.parse_args(arguments).tag
    if tag is not None and tag.removeprefix("v") != version():
        print(f"the tag is {tag}, the version {version()}; change one of them", file=sys.stderr)
        return 1
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT], check=True, stdout=subprocess.DEVNULL
    )
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True)
    with zipfile.ZipFile(wheel) as packed:
        in_wheel = packed.namelist()
    with tarfile.open(sdist) as packed_source:
        in_sdist = [name.partition("/")[2] for name in packed_source.getnames()]
    for path, names in ((wheel, in_wheel), (sdist, in_sdist)):
        counts = Counter("/".join(name.split("/")[: 2 if path == wheel else 1]) for name in names)
        print(f"{path.name}: {len(names)} files, {path.stat().st_size / 1e6:.1f} MB")
        print("  " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    package = ROOT / "src/kvboost"
    lines = {str(f.relative_to(package)): len(f.read_text().splitlines()) for f in package.rglob("*.py")}
    print(f"  {sum(lines.values()):,} lines of Python in {len(lines)} files")
    faults = wheel_faults(in_wheel) + sdist_faults(in_sdist) + size_faults(lines)
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
