"""Non-prefix reuse and KV paging are optional: with both packages deleted, exact reuse is what it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_EXACT = [
    "tests/core",
    "tests/engine/test_exact.py::test_hit_lengths_around_every_chunk_end",
    "tests/engine/test_exact.py::test_random_requests_are_bit_identical_to_cold_ones[llama]",
    "tests/engine/test_engine.py",
]
_SAYS_WHY = """
import pytest
from kvboost import ConfigError, KVBoost
from tests.helpers.models import tiny_model

engine = KVBoost(tiny_model("llama"), quality="high")
assert "kvboost.approx is not installed" in engine.describe()["non-prefix reuse"], engine.describe()
with pytest.raises(ConfigError, match="leave it out"):
    KVBoost(tiny_model("llama"), kv_bytes="1MB")
"""


def test_the_exact_core_works_without_them(tmp_path: Path) -> None:
    shutil.copytree(_ROOT / "src", tmp_path / "src")
    for package in ("approx", "offload/kv"):
        shutil.rmtree(tmp_path / "src" / "kvboost" / package)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{_ROOT}"}
    where = "import kvboost.core; print(kvboost.core.__file__)"
    for command in ([sys.executable, "-c", where], [sys.executable, "-c", _SAYS_WHY]):
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not done.stdout or str(tmp_path) in done.stdout, "the copy must be what is tested"
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not real",
        "-k",
        "not recompute",
        "-p",
        "no:cacheprovider",
        *_EXACT,
    ]
    done = subprocess.run(tests, env=environment, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
