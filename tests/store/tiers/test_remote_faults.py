"""A broken server, through a proxy that breaks it: what it costs requests, and that it is used again once mended."""

from __future__ import annotations

import socket
import threading
import time
import warnings

import pytest

from benchmarks.common.faults import Fault, FaultyProxy
from benchmarks.common.servers import RedisServer, free_port, redis_server
from benchmarks.store.redis_tier import cost_of, is_bearable
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.redis.tier import RedisTier
from kvboost.store.tiers.remote import Breaker
from kvboost.types import PutOutcome
from tests.contracts.blocks import assert_same, block_of, namespace
from tests.contracts.content import prompt


def open_tier(port: int, **options: float) -> RedisTier:
    return RedisTier(f"redis://127.0.0.1:{port}/0", records=RecordFormat(namespace()), **options)


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE], ids=lambda f: f.value)
def test_a_fault_costs_the_first_requests_little_and_the_next_ones_nothing(redis_at: RedisServer, fault: Fault) -> None:
    """Three tries, as the machine may stand still for longer than a request may take."""
    for _ in range(3):
        cost = cost_of(fault, redis_at.port, broken_s=0.3)
        if is_bearable(cost):
            return
    raise AssertionError(f"{fault.value}: {cost}")


@pytest.mark.parametrize(
    "fault", [Fault.TRUNCATED, Fault.RESET, Fault.GARBAGE, Fault.BLACK_HOLE], ids=lambda f: f.value
)
def test_a_load_that_breaks_in_the_middle_is_misses_and_one_warning(redis_at: RedisServer, fault: Fault) -> None:
    """Garbage may begin within the last value of a batch: then that one is whole, damaged and warned of as well."""
    chunks = prompt(*"abcdefghijkl")
    blocks = [block_of(chunk, 2**21) for chunk in chunks]  # more than is asked for ahead
    with FaultyProxy(redis_at.port) as proxy:
        tier = open_tier(proxy.port, timeout_s=1.0)
        for block in blocks:
            assert tier.store(block) is PutOutcome.STORED
        loading = iter(tier.load([block.key for block in blocks]))
        assert_same(next(loading), blocks[0])
        proxy.fault = fault
        with pytest.warns(RuntimeWarning) as seen:
            found = list(loading)
        damaged = tier.stats().rejected
        assert damaged == 0 or fault is Fault.GARBAGE
        assert ["cannot be used" in str(warned.message) for warned in seen].count(True) == 1
        assert len(seen) == 1 + (damaged > 0)  # the first of each kind
        assert len(found) == 11
        assert found[-1] is None, "a block came through a broken proxy"
        for block, original in zip(found, blocks[1:], strict=True):
            if block is not None:
                assert_same(block, original)
        assert not tier.is_available
        assert sum(tier.health().values()) == 1 + damaged
        tier.close()


def test_a_server_that_takes_no_connections_costs_no_more() -> None:
    """Not even an answer to the first packet, as behind a firewall."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(4):  # a full queue: the next ones are ignored
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        with pytest.warns(RuntimeWarning, match="cannot be used"):
            tier = open_tier(port, timeout_s=0.3)  # waits a second: nobody's request
        begin = time.perf_counter()
        for _ in range(100):
            assert list(tier.load([bytes(32)])) == [None]
        assert time.perf_counter() - begin < 10.0, "each request waits anew"
        tier.close()
        for filler in fillers:
            filler.close()


def test_a_server_that_starts_later_is_used_then() -> None:
    port = free_port()
    with pytest.warns(RuntimeWarning, match="check that the server runs"):
        tier = open_tier(port, timeout_s=5.0)
    block = block_of(prompt("a")[0])
    assert tier.store(block) is PutOutcome.REFUSED
    with redis_server(port=port):
        for _ in range(1000):
            if tier.is_available:
                break
            time.sleep(0.01)
        assert tier.store(block) is PutOutcome.STORED
        assert_same(next(iter(tier.load([block.key]))), block)
        tier.close()


def test_a_connection_closed_while_idle_costs_nothing(redis_at: RedisServer) -> None:
    import redis

    tier = open_tier(redis_at.port, timeout_s=30.0)
    block = block_of(prompt("a")[0])
    tier.store(block)
    with redis.Redis.from_url(redis_at.url) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    assert_same(next(iter(tier.load([block.key]))), block)
    assert tier.health() == {}
    tier.close()


def test_everything_is_quiet_while_the_breaker_is_open(redis_at: RedisServer) -> None:
    chunks = prompt("a", "b")
    with FaultyProxy(redis_at.port) as proxy:
        tier = open_tier(proxy.port)
        proxy.fault = Fault.REFUSED
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tier.contains([chunks[0].prefix_key])
        keys = [chunk.prefix_key for chunk in chunks]
        assert tier.contains(keys) == [False, False]
        assert list(tier.load(keys)) == [None, None]
        assert tier.variants([chunks[0].content_key]) == [[]]
        assert tier.store(block_of(chunks[0])) is PutOutcome.REFUSED
        tier.used(keys)
        tier.remove(keys)
        tier.flush()
        tier.clear()
        assert (tier.stats().chunks, tier.stats().misses, tier.stats().refused) == (0, 2, 1)
        tier.close()


# The breaker alone


def test_the_breaker_opens_at_once_and_closes_after_a_good_look() -> None:
    answers = [False, False, True]
    looked = threading.Event()

    def probe() -> bool:
        answer = answers.pop(0)
        if not answers:
            looked.set()
        return answer

    breaker = Breaker(probe, name="test")
    assert not breaker.is_open
    breaker.failed()
    breaker.failed()  # one look at a time
    assert breaker.is_open
    assert looked.wait(30)
    for _ in range(1000):
        if not breaker.is_open:
            break
        time.sleep(0.01)
    assert not breaker.is_open
    assert answers == []
    breaker.close()
    assert breaker.is_open


def test_the_breaker_looks_less_and_less_often() -> None:
    looks: list[float] = []

    def probe() -> bool:
        looks.append(time.monotonic())
        return False

    breaker = Breaker(probe, name="test")
    breaker.failed()
    time.sleep(1.0)
    breaker.close()
    assert 2 <= len(looks) <= 6
    time.sleep(0.1)
    assert len(looks) <= 6, "it looks on although it was closed"
