from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from benchmarks.common.report import BenchError
from benchmarks.common.servers import RedisServer, redis_server
from kvboost.core.prefill import Prefiller
from tests.helpers.models import smollm2_folder, tiny_model
from tests.helpers.places import KINDS, Place

# How long an example takes is no property of the code on a machine that does other things as well.
settings.register_profile("kvboost", deadline=None)
# For thousands of runs of which most fail (tools/mutants.py): the same examples each time, and none made smaller.
settings.register_profile(
    "mutants",
    deadline=None,
    max_examples=20,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvboost")


@pytest.fixture(scope="session", autouse=True)
def _own_cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave the user's digests of weights and measurements of models alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBOOST_CACHE_HOME", str(tmp_path_factory.mktemp("cache-home")))
        yield


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What one test patches, and so finds, is not what another finds."""
    monkeypatch.setenv("KVBOOST_CACHE_HOME", str(tmp_path_factory.mktemp("cache-home")))


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Tiny models by family, each made once."""
    made: dict[Any, Any] = {}

    def get(family: str, **overrides: Any) -> Any:
        key = (family, repr(sorted(overrides.items())))
        if key not in made:
            made[key] = tiny_model(family, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the conversion's own, once in a machine's life
        return str(smollm2_folder())


@pytest.fixture(scope="session")
def smollm2(smollm2_path: str) -> Any:
    """The trained model in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(scope="session")
def _running_redis() -> Iterator[RedisServer]:
    try:
        with redis_server() as server:
            yield server
    except BenchError as error:
        pytest.skip(str(error))


@pytest.fixture
def redis_at(_running_redis: RedisServer) -> RedisServer:
    """A real server of our own, empty."""
    import redis

    with redis.Redis.from_url(_running_redis.url) as client:
        client.flushall()
    return _running_redis


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place of records of each kind, over real servers."""
    if request.param == "disk":
        return Place("disk", str(tmp_path / "cache"))
    return Place("redis", request.getfixturevalue("redis_at").url)


@pytest.fixture
def prices_as_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether moving pays is decided by a guess under which it does: a busy machine must not decide a test."""
    monkeypatch.setattr(Prefiller, "_observe", lambda self, reading: None)
    monkeypatch.setattr("kvboost.core.costs._DEFAULT_REPAIR_FACTOR", 0.4)
