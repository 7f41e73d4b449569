"""Installs the built wheel with each extra alone and imports what that brings: ``python -m tools.install [EXTRA ...]``.

Run after :mod:`tools.package`. Every extra gets a new environment. What the core depends on is installed once, in an
environment whose packages the others see; kvboost itself is installed in each. `vllm` is left out: it brings another
torch along, and is meant for an environment that has it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from kvboost.errors import EXTRAS
from tools.package import DIST, version

_CORE = "(none)"
_LOOK = """
import importlib, sys
import kvboost
for module in sys.argv[1:]:
    importlib.import_module(module)
print(kvboost.__version__)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Install and import; 0 if every extra works."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"of {', '.join(EXTRAS)}; default: all")
    wanted = parser.parse_args(arguments).extras or [_CORE, *EXTRAS]
    if unknown := [extra for extra in wanted if extra not in (_CORE, *EXTRAS)]:
        parser.error(f"there is no extra {unknown[0]!r}; the extras are {', '.join(EXTRAS)}")
    wheel = DIST / f"kvboost-{version()}-py3-none-any.whl"
    if not wheel.is_file():
        parser.error(f"there is no {wheel.name} in dist; run python -m tools.package first")
    failed = []
    print("installing what the core needs", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvboost-install-") as folder:
        core = _environment(Path(folder) / "core")
        try:
            # torch first: a dependency asking for it on its own would bring another build along.
            _pip(core, f"torch=={metadata.version('torch').partition('+')[0]}")
            _pip(core, str(wheel))
            subprocess.run([core, "-m", "pip", "uninstall", "-q", "-y", "kvboost"], check=True)
        except subprocess.CalledProcessError as error:
            print(f"pip could not install what the core needs: {_last_line(error)}", file=sys.stderr)
            return 1
        for extra in wanted:
            begin = time.monotonic()
            fault = _try(Path(folder), core, wheel, extra)
            print(f"{extra:<12} {fault or 'works'}, {time.monotonic() - begin:.0f} s", flush=True)
            failed += [extra] if fault is not None else []
    return 1 if failed else 0


def _try(folder: Path, core: Path, wheel: Path, extra: str) -> str | None:
    """What is wrong with an extra; None if it works."""
    python = _environment(folder / extra, seen=_packages_of(core))
    try:
        _pip(python, f"{wheel}[{extra}]" if extra != _CORE else str(wheel))
        look = [python, "-W", "ignore", "-c", _LOOK, *EXTRAS.get(extra, ())]
        found = subprocess.run(look, check=True, capture_output=True, text=True, cwd=folder)
        subprocess.run([python.parent / "kvboost", "--version"], check=True, capture_output=True, text=True, cwd=folder)
    except subprocess.CalledProcessError as error:
        return f"FAILED: {_last_line(error)}"
    there = found.stdout.splitlines()[-1]
    return None if there == version() else f"FAILED: version {there} instead of {version()}"


def _last_line(error: subprocess.CalledProcessError) -> str:
    return str(error.stderr or error.stdout or error).strip().splitlines()[-1]


def _environment(folder: Path, *, seen: Path | None = None) -> Path:
    """The Python of a new environment, which sees the packages of another one."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    if seen is not None:
        (_packages_of(python) / "core.pth").write_text(f"{seen}\n", encoding="utf-8")
    return python


def _packages_of(python: Path) -> Path:
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())


def _pip(python: Path, *what: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "-q", *what], check=True, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
