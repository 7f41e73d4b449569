"""The program of a contestant's process: ``PYTHON start.py NAME '{"model": ..., "dtype": ..., ...}'``.

It runs by its path, in environments without this package, and imports its neighbours under a name that hides nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path


def load(module: str) -> object:
    """A module of this folder."""
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        "kvboost_rivals", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["kvboost_rivals"] = package
    spec.loader.exec_module(package)
    return importlib.import_module(f"kvboost_rivals.{module}")


if __name__ == "__main__":
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]  # a file here must not hide a package of the rival
    load("protocol").main(sys.argv[1:])  # type: ignore[attr-defined]
