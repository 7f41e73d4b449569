from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.serving import tiny_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("bench") / "tiny-llama", max_position_embeddings=8192))


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that answers as a rival would, at once, and says what it was given."""
    script = tmp_path_factory.mktemp("rival") / "python"
    script.write_text(_STAND_IN)
    script.chmod(0o755)
    return script


_STAND_IN = """#!/bin/sh
echo '{"ready": true, "versions": {"path": "'"$PYTHONPATH"'"}, "dtype": "float32", "threads": 2}'
while read -r line; do
  case "$line" in
    *'"do": "generate"'*)
      echo '{"ttft_ms": 50, "cpu_ms": 40, "total_ms": 60, "total_cpu_ms": 45, "tokens": [1], "cached": 0}' ;;
    *'"do": "status"'*) echo '{"rss_peak": 1000000}' ;;
    *) echo '{}' ;;
  esac
done
"""
