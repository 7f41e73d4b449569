"""Bill of materials and licences of an environment: ``python -m tools.sbom PYTHON`` writes both to build/.

PYTHON is the interpreter of an environment into which the wheel was installed, with the extras that are shipped. Needs
the extra ``release`` here, and nothing there. build/sbom.cdx.json is CycloneDX, build/licences.md a table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BUILD = Path(__file__).resolve().parents[1] / "build"


def commands(python: str, folder: Path) -> list[list[str]]:
    """What is run: the two tools, each over the other environment."""
    tools = Path(sys.executable).parent
    return [
        [
            str(tools / "cyclonedx-py"),
            "environment",
            python,
            "--output-reproducible",
            "-o",
            str(folder / "sbom.cdx.json"),
        ],
        [
            str(tools / "pip-licenses"),
            f"--python={python}",
            "--format=markdown",
            "--with-urls",
            f"--output-file={folder / 'licences.md'}",
        ],
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="the interpreter of the environment")
    python = parser.parse_args(arguments).python
    BUILD.mkdir(exist_ok=True)
    for command in commands(python, BUILD):
        subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
