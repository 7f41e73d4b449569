"""These tests need Ray: see ``.ci/ray``. One Ray of their own for all of them, on this machine."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.serving import tiny_folder

if find_spec("ray") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, while it is imported
        import ray.serve


@pytest.fixture(scope="session")
def installed() -> None:
    """Ray is there."""
    if find_spec("ray") is None:
        pytest.skip("needs Ray: .ci/ray installs it")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its tokenizer, of four layers: large enough that prefilling takes longer than looking up."""
    return tiny_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


@pytest.fixture(scope="session")
def cluster(installed: None) -> Iterator[None]:
    """A Ray that every test uses."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=100 * 2**20, logging_level="error")
    yield
    ray.shutdown()


def until(true: Callable[[], Any], *, seconds: float = 120.0) -> Any:
    """Wait for something to become true; returns it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := true():
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:g} s")
