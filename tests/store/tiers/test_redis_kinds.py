"""A master that a real Sentinel names, and the URLs of every kind of Redis."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.servers import RedisServer, free_port
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.store import RedisTier
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.redis.client import client_maker, place_of
from kvboost.types import PutOutcome
from tests.contracts.blocks import block_of, namespace
from tests.contracts.content import prompt

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")

RECORDS = RecordFormat(namespace())


def until(holds: Callable[[], bool], *, seconds: float = 8.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.02)


def test_the_master_that_sentinels_name_is_used(redis_at: RedisServer, tmp_path: Path) -> None:
    import redis

    port = free_port()
    file = tmp_path / "sentinel.conf"
    file.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor cache 127.0.0.1 {redis_at.port} 1\n")
    command = ["redis-server", str(file), "--sentinel"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with redis.Redis(port=port) as client:
                until(lambda: _answers(client))
            url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/cache/1"
            tier = RedisTier(url, records=RECORDS, timeout_s=10.0)
            block = block_of(prompt("a")[0])
            assert tier.store(block) is PutOutcome.STORED
            tier.close()
            with redis.Redis(port=redis_at.port, db=1) as master:
                assert master.dbsize() > 0
        finally:
            process.kill()


def _answers(client: Any) -> bool:
    import redis

    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


@pytest.mark.parametrize(
    "url", ["redis+cluster://h:1", "rediss+sentinel://u:p@h:1/service/2", "redis+sentinel://a,b:2/s", "rediss://h"]
)
def test_urls_that_are_known(url: str) -> None:
    assert EngineConfig(remote_url=url).remote_url == url
    client_maker(url, timeout_s=1.0)
    assert "p@" not in place_of(url)


@pytest.mark.parametrize("url", ["redis+sentinel://h:1", "redis+ring://h:1/x", "redis+cluster://h:1/x:y?db=z"])
def test_urls_that_cannot_work(url: str) -> None:
    with pytest.raises(ConfigError, match="redis"):
        client_maker(url, timeout_s=1.0)


@pytest.mark.parametrize(
    "url",
    ["redis://:se/cret@h", "redis+cluster://:se/cret@h:1", "redis+sentinel://:se/cret@h/s", "redis://:se\u2100@h"],
)
def test_no_part_of_a_password_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="percent-encoded") as error:
        client_maker(url, timeout_s=1.0)
    assert "'se" not in str(error.value)
    assert ":se" not in str(error.value)
