"""These tests need a vLLM environment: ``KVBOOST_VLLM_PYTHON=.../bin/python``. See ``.ci/vllm``."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.vllm_engine import VLLMEngine

PYTHON = Path(os.environ.get("KVBOOST_VLLM_PYTHON", ""))


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> Path:
    """SmolLM2, or the folder in ``KVBOOST_VLLM_MODEL``."""
    if not os.environ.get("KVBOOST_VLLM_PYTHON"):
        pytest.skip("needs vLLM: set KVBOOST_VLLM_PYTHON")
    return Path(os.environ.get("KVBOOST_VLLM_MODEL") or request.getfixturevalue("smollm2_path"))


@pytest.fixture
def prompt() -> list[int]:
    """640 tokens."""
    source = random.Random(1)
    return [source.randrange(1000, 30000) for _ in range(640)]


def engine(model: Path, **settings: Any) -> VLLMEngine:
    """A vLLM engine of that environment."""
    return VLLMEngine(PYTHON, model, **settings)
