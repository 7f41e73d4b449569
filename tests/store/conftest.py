from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvboost.bench.report import BenchError
from kvboost.bench.servers import RedisServer, redis_server


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
