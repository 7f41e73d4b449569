"""Redis Cluster: the contract on three real nodes, values on all of them, a node that dies, a slot that moves."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from benchmarks.common.servers import RedisCluster, RedisServer, cluster_ports, redis_cluster, redis_server
from kvboost.errors import PlaceError
from kvboost.extend import Tier
from kvboost.store import RedisTier
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from kvboost.types import KVBlock, Namespace, PutOutcome
from tests.contracts import TierContract
from tests.contracts.blocks import SIZE, assert_same, block_of, namespace
from tests.contracts.content import prompt

pytestmark = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-server or redis-cli is not installed")

RECORDS = RecordFormat(namespace())


@pytest.fixture(scope="module")
def running() -> Iterator[RedisCluster]:
    with redis_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running: RedisCluster) -> RedisCluster:
    running.flush()
    return running


def until(holds: Callable[[], bool], *, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.02)


@contextmanager
def clients(cluster: RedisCluster) -> Iterator[list[Any]]:
    import redis

    opened = [redis.Redis(port=node.port) for node in cluster.nodes]
    yield opened
    for client in opened:
        client.close()


def values(client: Any) -> list[bytes]:
    return list(client.scan_iter("kvboost:2:*", count=1000, _type="string"))


def open_tier(cluster: RedisCluster, **options: Any) -> closing[RedisTier]:
    options = {"records": RECORDS, "timeout_s": 10.0, **options}
    return closing(RedisTier(cluster.url, **options))


def some_blocks(count: int, nbytes: int = SIZE) -> list[KVBlock]:
    return [block_of(prompt(f"text {number}")[0], nbytes) for number in range(count)]


def keys(blocks: Sequence[KVBlock]) -> list[bytes]:
    return [block.key for block in blocks]


class TestClusterContract(TierContract):
    has_limit = counts = False

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: RedisCluster) -> None:
        self.cluster = cluster

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        return RedisTier(self.cluster.url, records=RecordFormat(namespace), timeout_s=30.0)


def test_values_lie_on_every_node_and_two_processes_share_them(cluster: RedisCluster) -> None:
    blocks = some_blocks(24, nbytes=1_500_000)
    with open_tier(cluster) as tier, open_tier(cluster) as other, clients(cluster) as nodes:
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        held = [values(node) for node in nodes]
        assert all(len(names) >= 3 for names in held), "a node has hardly anything"
        assert sum(map(len, held)) == 24
        for found, block in zip(other.load(keys(blocks)), blocks, strict=True):
            assert_same(found, block)
        assert [len(found) for found in other.variants([block.content_key for block in blocks])] == [1] * 24
        tier.clear()
        assert sum(node.dbsize() for node in nodes) == 0, "a pointer is left, or a value"


def test_blocks_with_a_time_limit_end(cluster: RedisCluster) -> None:
    blocks = some_blocks(6)
    with open_tier(cluster, ttl_seconds=0.3) as tier:
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        time.sleep(0.4)
        assert tier.contains(keys(blocks)) == [False] * 6


def test_the_catalogue_sees_and_removes_all(cluster: RedisCluster) -> None:
    blocks = some_blocks(9)
    with open_tier(cluster) as tier, closing(open_catalogue(cluster.url)) as catalogue:
        for block in blocks:
            tier.store(block)
        entries = list(catalogue.entries())
        assert {entry.key for entry in entries} == set(keys(blocks))
        for entry, record in catalogue.records(entries):
            assert record is not None
            assert RECORDS.decode(record, entry.key).key == entry.key
        assert all(head for _, head in catalogue.heads(entries))
        assert catalogue.remove(entries[:2]) == 2
        assert catalogue.purge(RECORDS.namespace.tenant) == 7
        assert tier.contains(keys(blocks)) == [False] * 9


def test_a_slot_that_moves_is_followed(cluster: RedisCluster) -> None:
    block = block_of(prompt("a")[0])
    with open_tier(cluster) as tier, clients(cluster) as nodes:
        assert tier.store(block) is PutOutcome.STORED
        old = next(node for node in nodes if values(node))
        new = next(node for node in nodes if node is not old)
        slot = old.execute_command("CLUSTER KEYSLOT", values(old)[0])
        old.delete(*values(old))
        identity, before = new.execute_command("CLUSTER MYID"), old.execute_command("CLUSTER MYID")
        try:
            for node in [new, *(node for node in nodes if node is not new)]:
                node.execute_command("CLUSTER SETSLOT", slot, "NODE", identity)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a node refused a command
                until(lambda: tier.store(block) is PutOutcome.STORED)
            assert len(values(new)) == 1
            assert_same(next(iter(tier.load([block.key]))), block)
        finally:
            new.flushall()
            for node in nodes:
                node.execute_command("CLUSTER SETSLOT", slot, "NODE", before)


# A node that dies


def _owners(cluster: RedisCluster, tier: RedisTier, blocks: Sequence[KVBlock]) -> dict[int, list[KVBlock]]:
    """The blocks by the port of their node."""
    owned: dict[int, list[KVBlock]] = {}
    with clients(cluster) as nodes:
        for server, node in zip(cluster.nodes, nodes, strict=True):
            held = {name.rpartition(b":")[2] for name in values(node)}
            owned[server.port] = [block for block in blocks if block.key.hex().encode() in held]
    return owned


def _restarted(server: RedisServer) -> Any:
    """The node as it comes back: with its place in the cluster and without its data."""
    options = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "1000"]
    arguments = server.process.args
    assert isinstance(arguments, list)
    folder = str(arguments[arguments.index("--dir") + 1])
    return redis_server([*options, "--dir", folder], port=server.port)


def test_a_node_that_dies_costs_hits_until_it_is_back_and_nothing_else() -> None:
    blocks = some_blocks(30)
    with redis_cluster() as cluster, open_tier(cluster, timeout_s=0.5) as tier:
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        owned = _owners(cluster, tier, blocks)
        victim = cluster.nodes[0]
        lost, kept = owned[victim.port], [b for port, held in owned.items() if port != victim.port for b in held]
        assert lost
        assert len(lost) + len(kept) == 30
        victim.process.kill()
        victim.process.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the cluster cannot be used
            took = []
            for _ in range(4):
                begin = time.monotonic()
                for found, block in zip(tier.load(keys(blocks)), blocks, strict=True):
                    if found is not None:
                        assert_same(found, block)
                assert tier.contains(keys(lost)) == [False] * len(lost)
                assert {tier.store(block) for block in lost} == {PutOutcome.REFUSED}
                took.append(time.monotonic() - begin)
            assert min(took[1:]) < 0.5, "requests wait for a node that is gone"
            assert not tier.is_available
            with _restarted(victim):
                until(lambda: tier.is_available)
                assert tier.contains(keys(kept)) == [True] * len(kept), "what other nodes hold is gone"
                until(lambda: all(tier.store(block) is not PutOutcome.REFUSED for block in blocks))
                for found_again, block in zip(tier.load(keys(blocks)), blocks, strict=True):
                    assert_same(found_again, block)


def test_a_purge_that_could_not_look_everywhere_says_so() -> None:
    with redis_cluster() as cluster, closing(open_catalogue(cluster.url)) as catalogue, open_tier(cluster) as tier:
        assert {tier.store(block) for block in some_blocks(12)} == {PutOutcome.STORED}
        cluster.nodes[2].process.kill()
        cluster.nodes[2].process.wait()
        with pytest.raises(PlaceError, match="check that it runs"):
            catalogue.purge(None)
        with pytest.warns(RuntimeWarning, match="cannot be used"):
            tier.purge(None)
        assert sum(tier.health().values()) == 1


def test_a_node_that_has_not_joined_is_not_believed(cluster: RedisCluster) -> None:
    (block,) = some_blocks(1)
    with redis_server(["--cluster-enabled", "yes"], port=cluster_ports(1)[0]) as lonely:
        hosts = [f"127.0.0.1:{server.port}" for server in (lonely, *cluster.nodes)]
        with closing(RedisTier(f"redis+cluster://{','.join(hosts)}", records=RECORDS, timeout_s=10.0)) as tier:
            assert tier.store(block) is PutOutcome.STORED
        with pytest.raises(PlaceError, match="knows no slots"):
            open_catalogue(f"redis+cluster://{hosts[0]}")


def test_a_cluster_that_is_not_there_is_a_miss_and_found_later() -> None:
    import redis

    block, port = block_of(prompt("a")[0]), cluster_ports(1)[0]
    url = f"redis+cluster://127.0.0.1:{port}"
    with pytest.raises(PlaceError):
        open_catalogue(url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with closing(RedisTier(url, records=RECORDS)) as tier:
            begin = time.monotonic()
            assert tier.contains([block.key]) == [False]
            assert list(tier.load([block.key])) == [None]
            assert tier.store(block) is PutOutcome.REFUSED
            assert time.monotonic() - begin < 5.0, "a request waited for a cluster that is not there"
            assert not tier.is_available
            with redis_server(["--cluster-enabled", "yes"], port=port), redis.Redis(port=port) as node:
                node.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
                until(lambda: tier.store(block) is PutOutcome.STORED)
                until(lambda: tier.contains([block.key]) == [True])
                assert tier.is_available
