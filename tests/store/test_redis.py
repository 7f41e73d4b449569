"""The Redis tier against a real server: its contract, several processes, killed writers, damage, time limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvboost.bench.report import BenchError
from kvboost.bench.servers import RedisServer, redis_server
from kvboost.extend import Tier
from kvboost.store.record import RecordFormat
from kvboost.store.redis import RedisTier
from kvboost.testing import TierContract
from kvboost.types import Namespace


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    try:
        running = redis_server()
        with running as started:
            yield started
    except BenchError as error:
        pytest.skip(str(error))


class TestRedisTierContract(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer) -> None:
        import redis

        self.url = server.url
        redis.Redis.from_url(server.url).flushall()

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        return RedisTier(self.url, capacity_bytes=capacity_bytes, records=RecordFormat(namespace), patience_s=5.0)
