"""Redis Cluster: the contract on three real nodes, values on all of them, a node that dies, a slot that moves."""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from benchmarks.common.servers import RedisCluster, RedisServer, free_port, redis_cluster, redis_server
from kvboost.errors import PlaceError
from kvboost.extend import Tier
from kvboost.store import RedisTier
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.redis.cluster import Cluster
from kvboost.store.tiers.redis.connecting import connector
from kvboost.store.tiers.redis.ledger import Ledger
from kvboost.store.tiers.redis.resp import ServerError
from kvboost.store.tiers.redis.scripts import FINISH
from kvboost.store.tiers.redis.server import Server, UnavailableError
from kvboost.testing import TierContract
from kvboost.testing.blocks import SIZE, assert_same, block_of, namespace
from kvboost.testing.content import prompt
from kvboost.types import KVBlock, Namespace, PutOutcome
from tests.helpers.places import set_limit

pytestmark = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-server or redis-cli is not installed")

RECORDS = RecordFormat(namespace())


@pytest.fixture(autouse=True)
def _no_sweeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of its own, that the servers of a test would not wait for."""
    monkeypatch.setattr(RedisTier, "_sweep", lambda self: None)


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
    return list(client.scan_iter("kvboost:{*", count=1000))


def has_ledger(client: Any) -> bool:
    return any(True for _ in client.scan_iter("{kvboost}:ledger*", count=1000))


def open_tier(cluster: RedisCluster, **options: Any) -> closing[RedisTier]:
    options = {"capacity_bytes": 2**30, "records": RECORDS, "timeout_s": 10.0, **options}
    return closing(RedisTier(cluster.url, **options))


def some_blocks(count: int, nbytes: int = SIZE) -> list[KVBlock]:
    return [block_of(prompt(f"text {number}")[0], nbytes) for number in range(count)]


def keys(blocks: Sequence[KVBlock]) -> list[bytes]:
    return [block.key for block in blocks]


class TestClusterContract(TierContract):
    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: RedisCluster) -> None:
        self.cluster = cluster

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        set_limit(self.cluster.url, capacity_bytes)
        records = RecordFormat(namespace)
        return RedisTier(self.cluster.url, capacity_bytes=capacity_bytes, records=records, timeout_s=30.0)


def test_values_lie_on_every_node_and_all_pieces_of_one_together(cluster: RedisCluster) -> None:
    blocks = some_blocks(24, nbytes=1_500_000)
    with open_tier(cluster) as tier, clients(cluster) as nodes:
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        held = [values(node) for node in nodes]
        assert all(len(names) >= 3 for names in held), "a node has hardly anything"
        chunks = [{name.partition(b"}")[0] for name in names} for names in held]
        assert sum(map(len, chunks)) == len(set().union(*chunks)) == 24, "a chunk's pieces lie on several nodes"
        assert sorted(has_ledger(node) for node in nodes) == [False, False, True], "the ledger lies on one node"
        for found, block in zip(tier.load(keys(blocks)), blocks, strict=True):
            assert_same(found, block)


def test_what_the_ledger_drops_is_removed_from_its_node(cluster: RedisCluster) -> None:
    blocks = some_blocks(30)
    each = RECORDS.size_of(blocks[0]) + 4096
    with open_tier(cluster, capacity_bytes=10 * each) as tier, clients(cluster) as nodes:
        for block in blocks:
            assert tier.store(block) is PutOutcome.STORED
        assert tier.stats().chunks == 10
        assert sum(len(values(node)) for node in nodes) == 10, "evicted values lie there still"
        tier.clear()
        assert sum(node.dbsize() for node in nodes) <= 2, "more is left than the limit and the clock"


def test_values_of_a_writer_that_died_are_removed_by_the_next(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = some_blocks(3)
    with open_tier(cluster) as tier, clients(cluster) as nodes:
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        with monkeypatch.context() as patched:
            patched.setattr("kvboost.store.tiers.redis.cluster.Cluster.unlink", lambda self, names: [])
            tier.remove(keys(blocks[:1]))
        assert tier.contains(keys(blocks[:1])) == [True], "nothing was left over, so this test tests nothing"
        assert tier.store(blocks[0]) is PutOutcome.REFUSED, "written while somebody may still remove it"
        node = next(node for node in nodes if has_ledger(node))
        assert node.zcard("{kvboost}:ledger:garbage") == 1
        for name in node.zrange("{kvboost}:ledger:garbage", 0, -1):
            node.zadd("{kvboost}:ledger:garbage", {name: 1})  # its claim is over
        tier.stats()
        assert tier.contains(keys(blocks)) == [False, True, True]
        assert tier.store(blocks[0]) is PutOutcome.STORED


def test_what_a_lost_ledger_knew_is_swept_from_all_nodes(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the sweeper runs
    with open_tier(cluster) as tier, clients(cluster) as nodes:
        for block in some_blocks(12):
            tier.store(block)
        _lose_the_ledger(nodes)
        assert sum(len(values(node)) for node in nodes) == 12
        new = block_of(prompt("new")[0])
        assert tier.store(new) is PutOutcome.STORED
        until(lambda: sum(len(values(node)) for node in nodes) == 1)
        ledger = next(node for node in nodes if has_ledger(node))
        until(lambda: not ledger.hexists("{kvboost}:ledger:place", "lost"))
        assert_same(next(iter(tier.load([new.key]))), new)


def test_what_is_written_ends_by_itself_until_the_ledger_has_it(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, given_up = some_blocks(2, nbytes=1_500_000)
    with open_tier(cluster) as tier, clients(cluster) as nodes:

        def limits() -> list[int]:
            return [node.pttl(name) for node in nodes for name in values(node)]

        assert tier.store(kept) is PutOutcome.STORED
        assert set(limits()) == {-1}, "what the ledger has ends"
        tier.remove([kept.key])
        with monkeypatch.context() as patched:  # its writer dies when all of it is written
            patched.setattr(Ledger, "_run", _dies_before_it_finishes(Ledger._run))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert tier.store(given_up) is PutOutcome.REFUSED
        left = limits()
        assert len(left) > 1, "it did not write, so this test tests nothing"
        assert 0 < min(left) <= max(left) <= 15_000


def _dies_before_it_finishes(run: Callable[..., Any]) -> Callable[..., Any]:
    def dies(self: Ledger, link: Any, script: str, *arguments: bytes) -> Any:
        if script is FINISH:
            raise ServerError("died")
        return run(self, link, script, *arguments)

    return dies


def test_what_could_not_be_kept_is_not_stored(cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = some_blocks(1)
    with open_tier(cluster) as tier:
        with monkeypatch.context() as patched:
            patched.setattr(Cluster, "keep", lambda self, names, ttl_ms: False)
            assert tier.store(block) is PutOutcome.REFUSED
        assert tier.stats().chunks == 0
        assert tier.store(block) is PutOutcome.STORED


def _lose_the_ledger(nodes: Sequence[Any]) -> None:
    for node in nodes:
        for name in node.scan_iter("{kvboost}:*"):
            node.delete(name)


@pytest.mark.parametrize("part", ["scan", "strays"])
def test_a_sweep_that_broke_off_is_begun_again(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.undo()  # the sweeper runs
    with open_tier(cluster) as tier, clients(cluster) as nodes:
        for block in some_blocks(12):
            tier.store(block)
        _lose_the_ledger(nodes)
        ended = threading.Event()

        def silent(self: Cluster, prefix: bytes) -> Iterator[list[bytes] | None]:
            yield None
            ended.set()

        def refused(self: Ledger, link: Any, *, names: Sequence[bytes]) -> bool:
            ended.set()
            raise ServerError("busy")

        with monkeypatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a command was refused
            if part == "scan":
                patched.setattr(Cluster, "scan", silent)
            else:
                patched.setattr(Ledger, "strays", refused)
            assert tier.store(block_of(prompt("new")[0])) is PutOutcome.STORED
            assert ended.wait(15.0)
            until(lambda: not any(thread.name == "kvboost-redis-sweep" for thread in threading.enumerate()))
        ledger = next(node for node in nodes if has_ledger(node))
        assert ledger.hexists("{kvboost}:ledger:place", "lost"), "a sweep that broke off was taken for a whole one"
        assert tier.store(block_of(prompt("newer")[0])) is PutOutcome.STORED
        assert sum(len(values(node)) for node in nodes) == 14, "begun again at once, whoever sweeps"
        ledger.hset("{kvboost}:ledger:place", "sweeping", 1)  # long ago
        assert tier.store(block_of(prompt("newest")[0])) is PutOutcome.STORED
        until(lambda: sum(len(values(node)) for node in nodes) == 3)
        until(lambda: ledger.hkeys("{kvboost}:ledger:place") == [b"capacity"])


def test_a_purge_that_could_not_look_everywhere_says_so(cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tier(cluster) as tier, clients(cluster) as nodes, closing(open_catalogue(cluster.url)) as catalogue:
        for block in some_blocks(12):
            tier.store(block)
        _lose_the_ledger(nodes)
        assert tier.store(block_of(prompt("new")[0])) is PutOutcome.STORED
        link = Server.link

        def silent(self: Server, deadline: Any) -> Any:
            if not self._connector.may_move:  # a node, not the ledger
                raise UnavailableError(ConnectionError("gone"))
            return link(self, deadline)

        with monkeypatch.context() as patched:
            patched.setattr(Cluster, "unlink", lambda self, names: list(names))
            patched.setattr(Server, "link", silent)
            with pytest.raises(PlaceError, match="gone"):
                catalogue.purge_all()
        assert catalogue.purge_all() == 0
        assert sum(len(values(node)) for node in nodes) <= 1, "what was unlinked above in name only"


def test_blocks_with_a_time_limit_end(cluster: RedisCluster) -> None:
    blocks = some_blocks(6)
    with open_tier(cluster, ttl_seconds=0.3) as tier:
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        time.sleep(0.4)
        assert tier.contains(keys(blocks)) == [False] * 6
        assert tier.stats().chunks == 0


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


def _holder_of_the_ledger(cluster: RedisCluster) -> RedisServer:
    with clients(cluster) as nodes:
        return next(server for server, node in zip(cluster.nodes, nodes, strict=True) if has_ledger(node))


def _owners(cluster: RedisCluster, tier: RedisTier, blocks: Sequence[KVBlock]) -> dict[int, list[KVBlock]]:
    """The blocks by the port of their node."""
    owned: dict[int, list[KVBlock]] = {}
    with clients(cluster) as nodes:
        for server, node in zip(cluster.nodes, nodes, strict=True):
            held = {name.partition(b"{")[2].partition(b"}")[0].rpartition(b":")[2] for name in values(node)}
            owned[server.port] = [block for block in blocks if block.key.hex().encode() in held]
    return owned


def _restarted(server: RedisServer) -> Any:
    """The node as it comes back: with its place in the cluster and without its data."""
    options = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "1000"]
    arguments = server.process.args
    assert isinstance(arguments, list)
    folder = str(arguments[arguments.index("--dir") + 1])
    return redis_server([*options, "--dir", folder], port=server.port)


@pytest.mark.parametrize("with_ledger", [False, True])
def test_a_node_that_dies_costs_its_own_values_only(with_ledger: bool) -> None:
    blocks = some_blocks(30)
    new = [block_of(prompt(f"new {number}")[0]) for number in range(30)]
    capacity = 30 * (RECORDS.size_of(blocks[0]) + 4096)
    with redis_cluster() as cluster, open_tier(cluster, capacity_bytes=capacity) as tier:
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        owned = _owners(cluster, tier, blocks)
        ledger = _holder_of_the_ledger(cluster)
        victim = ledger if with_ledger else next(node for node in cluster.nodes if node is not ledger)
        lost, kept = owned[victim.port], [b for port, held in owned.items() if port != victim.port for b in held]
        assert lost
        assert len(lost) + len(kept) == 30
        victim.process.kill()
        victim.process.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a node cannot be used
            for _ in range(3):
                assert tier.contains(keys(kept)) == [True] * len(kept)
                assert tier.contains(keys(lost)) == [False] * len(lost)
                found = dict(zip(keys(blocks), tier.load(keys(blocks)), strict=True))
                for block in kept:
                    assert_same(found[block.key], block)
                assert all(found[block.key] is None for block in lost)
            assert not tier.is_available
            nodes = connector(cluster.url, prefix="kvboost").nodes
            assert nodes is not None
            assert len(nodes.slots()) == 16384, "the others are not asked"
            outcomes = [tier.store(block) for block in new]
            if with_ledger:
                assert set(outcomes) == {PutOutcome.REFUSED}
                assert tier.variants([blocks[0].content_key]) == [[]]
            else:
                assert set(outcomes) == {PutOutcome.STORED, PutOutcome.REFUSED}
                stored = outcomes.count(PutOutcome.STORED)
                assert tier.stats().evictions == stored, "others were evicted for what could not be written"
                before = dict(tier.health())
                tier.purge(RECORDS.namespace.tenant)
                assert tier.health() != before, "a purge that left values behind said nothing"
            with _restarted(victim):
                until(lambda: tier.is_available)
                if with_ledger:  # it is empty; what others have is not counted any more, and swept
                    until(lambda: tier.store(blocks[0]) is not PutOutcome.REFUSED)
                else:
                    until(lambda: all(tier.store(block) is not PutOutcome.REFUSED for block in blocks))
                    for found_again, block in zip(tier.load(keys(blocks)), blocks, strict=True):
                        assert_same(found_again, block)


def test_limits_in_the_url_do_not_replace_ours(cluster: RedisCluster) -> None:
    nodes = connector(cluster.url + "?socket_timeout=5&socket_connect_timeout=5", prefix="kvboost").nodes
    assert nodes is not None
    assert len(nodes.slots()) == 16384


def test_a_node_that_has_not_joined_is_not_believed(cluster: RedisCluster) -> None:
    with redis_server(["--cluster-enabled", "yes"], port=_port_of_a_node()) as lonely:
        hosts = [f"127.0.0.1:{server.port}" for server in (lonely, *cluster.nodes)]
        nodes = connector(f"redis+cluster://{','.join(hosts)}", prefix="kvboost").nodes
        assert nodes is not None
        assert len(nodes.slots()) == 16384
        alone = connector(f"redis+cluster://{hosts[0]}", prefix="kvboost").nodes
        assert alone is not None
        with pytest.raises(ConnectionError, match="knows no slots"):
            alone.slots()


def _port_of_a_node() -> int:
    """The bus of a node has its port + 10000, which must be one too."""
    return next(port for port in (free_port() for _ in range(100)) if port < 55000)


def test_a_cluster_that_is_not_there_is_a_miss_and_found_later() -> None:
    import redis

    block, port = block_of(prompt("a")[0]), _port_of_a_node()
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
            assert time.monotonic() - begin < 1.0, "a request waited for a cluster that is not there"
            assert not tier.is_available
            with redis_server(["--cluster-enabled", "yes"], port=port), redis.Redis(port=port) as node:
                node.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
                until(lambda: tier.store(block) is PutOutcome.STORED)
                until(lambda: tier.contains([block.key]) == [True])
                assert tier.is_available
