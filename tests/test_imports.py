"""Planning and bookkeeping run without torch. import-linter sees whether a module names it, in annotations too."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_LIGHT = [
    "kvboost.capacity",
    "kvboost.explain.replay",
    "kvboost.explain.report",
    "kvboost.types",
    "kvboost.config",
    "kvboost.errors",
    "kvboost.extend",
    "kvboost.core.arrange",
    "kvboost.core.chunking",
    "kvboost.core.keys",
    "kvboost.core.plan",
    "kvboost.approx.guard",
    "kvboost.approx.calibration",
    "kvboost.approx.trust",
    "kvboost.scheduler.queue",
    "kvboost.fleet",
]


@pytest.mark.parametrize("module", _LIGHT)
def test_it_imports_neither_torch_nor_transformers(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted({{'torch', 'transformers'}} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == []
