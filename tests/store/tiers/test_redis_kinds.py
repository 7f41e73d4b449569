"""A Redis Cluster of three real nodes, and a master that a Sentinel names."""

from __future__ import annotations

import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.servers import RedisServer, free_port, redis_server
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.store import RedisTier
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.redis.connecting import connector, place_of
from kvboost.testing.blocks import assert_same, block_of, namespace
from kvboost.testing.content import prompt
from kvboost.types import KVBlock, PutOutcome

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")

RECORDS = RecordFormat(namespace())
SLOTS = 16384


@pytest.fixture(autouse=True)
def _no_sweeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of its own, that the servers of a test would not wait for."""
    monkeypatch.setattr(RedisTier, "_sweep", lambda self: None)


def until(holds: Callable[[], bool], *, seconds: float = 8.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.02)


def opened(server: RedisServer) -> Any:
    import redis

    return redis.Redis(port=server.port, decode_responses=True)


@contextmanager
def cluster() -> Iterator[list[Any]]:
    """Clients of three masters, each with a third of the slots."""
    with ExitStack() as stack:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
        # The bus of a node has its port + 10000, which must be one too.
        ports = [port for port in (free_port() for _ in range(200)) if port < 55000][:3]
        servers = [stack.enter_context(redis_server(options, port=port)) for port in ports]
        clients = [stack.enter_context(opened(server)) for server in servers]
        borders = [0, SLOTS // 3, 2 * SLOTS // 3, SLOTS]
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER ADDSLOTSRANGE", borders[number], borders[number + 1] - 1)
            for port in ports[:number]:
                client.execute_command("CLUSTER MEET", "127.0.0.1", port)
        until(lambda: all(_state(client) == ("ok", "3") for client in clients))
        yield clients


def _state(client: Any) -> tuple[str, str]:
    told = client.execute_command("CLUSTER INFO")
    told = told if isinstance(told, dict) else dict(line.split(":") for line in told.split())
    return told["cluster_state"], told["cluster_known_nodes"]


def test_a_cluster_keeps_a_cache_and_is_followed_when_its_slot_moves() -> None:
    with cluster() as clients:
        ports = [client.connection_pool.connection_kwargs["port"] for client in clients]
        url = f"redis+cluster://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
        tier = RedisTier(url, capacity_bytes=2**30, records=RECORDS, timeout_s=10.0)
        blocks = [block_of(chunk, 2 * 10**6) for chunk in prompt("a", "b", "c")]
        assert [tier.store(block) for block in blocks] == [PutOutcome.STORED] * 3
        for found, block in zip(tier.load([block.key for block in blocks]), blocks, strict=True):
            assert_same(found, block)
        assert sorted(client.dbsize() > 0 for client in clients) == [False, False, True], "not on one node"
        catalogue = open_catalogue(url)
        assert sum(1 for _ in catalogue.entries()) == 3
        assert catalogue.purge(RECORDS.namespace.tenant) == 3
        catalogue.close()
        assert tier.contains([block.key for block in blocks]) == [False] * 3

        slot = clients[0].execute_command("CLUSTER KEYSLOT", "{kvboost}")
        new = next(client for client in clients if client.dbsize() == 0)
        for client in clients:
            client.flushall()
        identity = new.execute_command("CLUSTER MYID")
        for client in [new, *(client for client in clients if client is not new)]:
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", identity)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the server refused a command
            until(lambda: tier.store(blocks[0]) is PutOutcome.STORED)
        assert new.dbsize() > 0
        assert_same(_first(tier, blocks[0]), blocks[0])
        tier.close()


def _first(tier: RedisTier, block: KVBlock) -> KVBlock | None:
    return next(iter(tier.load([block.key])))


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
            tier = RedisTier(url, capacity_bytes=2**30, records=RECORDS, timeout_s=10.0)
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
    connector(url, prefix="kvboost")
    assert "p@" not in place_of(url)


@pytest.mark.parametrize("url", ["redis+sentinel://h:1", "redis+ring://h:1/x", "redis+cluster://h:1/x:y?db=z"])
def test_urls_that_cannot_work(url: str) -> None:
    with pytest.raises(ConfigError, match="redis"):
        connector(url, prefix="kvboost")
