"""These tests need a vLLM environment: ``KVBOOST_VLLM_PYTHON=.../bin/python``. See ``.ci/vllm``."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.vllm_engine import VLLMEngine

PYTHON = Path(os.environ.get("KVBOOST_VLLM_PYTHON", ""))
MODELS = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvboost" / "models"


@pytest.fixture
def model() -> Path:
    """A trained model, as ``.ci/vllm`` makes it."""
    if not os.environ.get("KVBOOST_VLLM_PYTHON"):
        pytest.skip("needs vLLM: set KVBOOST_VLLM_PYTHON")
    return MODELS / os.environ.get("KVBOOST_VLLM_MODEL", "smollm2-135m")


@pytest.fixture
def prompt() -> list[int]:
    """640 tokens."""
    source = random.Random(1)
    return [source.randrange(1000, 30000) for _ in range(640)]


def engine(model: Path, **settings: Any) -> VLLMEngine:
    """A vLLM engine of that environment."""
    return VLLMEngine(PYTHON, model, **settings)
