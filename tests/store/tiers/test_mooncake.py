"""A real Mooncake Store over TCP, where its package is installed: the contract, purges, what dies, URLs."""

from __future__ import annotations

import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from benchmarks.common.servers import MooncakeStore, mooncake_store
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError, PlaceError
from kvboost.extend import Tier
from kvboost.store import RedisTier
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.mooncake import parse_mooncake
from kvboost.types import KVBlock, Namespace, PutOutcome, tenant_digest
from tests.contracts import TierContract
from tests.contracts.blocks import SIZE, assert_same, block_of, namespace
from tests.contracts.content import prompt

RECORDS = RecordFormat(namespace())


def _is_installed() -> bool:
    try:
        import mooncake.store  # noqa: F401
    except ImportError:
        return False
    return True


real = pytest.mark.skipif(not _is_installed(), reason="mooncake-transfer-engine-non-cuda is not installed")


@pytest.fixture(scope="module")
def store() -> Iterator[MooncakeStore]:
    with mooncake_store() as running:
        yield running


@pytest.fixture
def url(store: MooncakeStore) -> str:
    return store.url


def until(holds: Callable[[], bool], *, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.05)


def open_tier(url: str, **options: Any) -> closing[RedisTier]:
    return closing(RedisTier(url, **{"records": RECORDS, "timeout_s": 10.0, **options}))


def some_blocks(name: str, count: int, nbytes: int = SIZE) -> list[KVBlock]:
    return [block_of(prompt(f"{name} {number}")[0], nbytes) for number in range(count)]


def keys(blocks: Sequence[KVBlock]) -> list[bytes]:
    return [block.key for block in blocks]


@real
class TestMooncakeContract(TierContract):
    has_limit = counts = False

    @pytest.fixture(autouse=True)
    def _place(self, url: str) -> Iterator[None]:
        self.url = url
        yield
        with closing(open_catalogue(url)) as catalogue:  # the store outlives a test
            catalogue.purge_all()

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        tier = RedisTier(self.url, records=RecordFormat(namespace), timeout_s=30.0)
        until(lambda: tier.is_available)  # a busy machine takes its time to set the store up
        return tier


@real
def test_large_blocks_come_back_whole(url: str) -> None:
    blocks = some_blocks("large", 4, nbytes=5 * 10**6)
    with open_tier(url) as tier:
        assert tier.name == "mooncake"
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        for found, block in zip(tier.load(keys(blocks)), blocks, strict=True):
            assert_same(found, block)
        tier.clear()
        assert tier.contains(keys(blocks)) == [False] * 4


@real
def test_a_purge_removes_a_tenants_values_and_no_others(url: str) -> None:
    records = [RecordFormat(Namespace(namespace().root, tenant_digest(tenant))) for tenant in ("a", "b")]
    (block,) = some_blocks("forgotten", 1)
    with open_tier(url, records=records[0]) as first, open_tier(url, records=records[1]) as second:
        assert first.store(block) is second.store(block) is PutOutcome.STORED
        first.purge(records[0].namespace.tenant)
        assert first.contains([block.key]) == [False]
        assert second.contains([block.key]) == [True], "another tenant's"
        assert not any(first.health().values())
        with closing(open_catalogue(url)) as catalogue:
            with pytest.raises(PlaceError, match="does not tell"):
                list(catalogue.entries())
            catalogue.purge_all()
        assert second.contains([block.key]) == [False]


@real
def test_a_master_that_dies_is_a_miss_and_is_found_again() -> None:
    blocks = some_blocks("master", 3)
    with mooncake_store() as store, open_tier(store.url, timeout_s=0.2) as tier:
        until(lambda: {tier.store(block) for block in blocks} <= {PutOutcome.STORED, PutOutcome.PRESENT})
        store.master.kill()
        store.master.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be used
            assert list(tier.load(keys(blocks))) == [None] * 3
            assert tier.contains(keys(blocks)) == [False] * 3
            assert tier.store(some_blocks("other", 1)[0]) is PutOutcome.REFUSED
            assert not tier.is_available
            with subprocess.Popen(store.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
                try:
                    until(lambda: tier.store(blocks[0]) is PutOutcome.STORED, seconds=60.0)  # it was lost
                    assert_same(next(iter(tier.load(keys(blocks[:1])))), blocks[0])
                finally:
                    master.kill()


@real
def test_memory_that_hangs_holds_up_no_request_for_long() -> None:
    blocks = some_blocks("hang", 6)
    with mooncake_store() as store, open_tier(store.url, timeout_s=0.2) as tier:
        until(lambda: {tier.store(block) for block in blocks} <= {PutOutcome.STORED, PutOutcome.PRESENT})
        store.memory.send_signal(signal.SIGSTOP)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                begin = time.monotonic()
                assert list(tier.load(keys(blocks))) == [None] * 6
                assert time.monotonic() - begin < 2.0, "a request waited for memory that hangs"
                assert not tier.is_available
        finally:
            store.memory.send_signal(signal.SIGCONT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            until(lambda: tier.is_available and None not in list(tier.load(keys(blocks))))


@real
def test_a_store_that_is_not_there_is_a_miss() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_tier("mooncake://127.0.0.1:1") as tier:
            (block,) = some_blocks("nowhere", 1)
            assert tier.store(block) is PutOutcome.REFUSED
            assert list(tier.load([block.key])) == [None]


def test_an_url_says_what_is_given() -> None:
    url = "mooncake://m:1?segment=1GiB&protocol=rdma&device=mlx5_0"
    parsed = parse_mooncake(url)
    assert (parsed.master, parsed.segment_bytes, parsed.protocol, parsed.device) == ("m:1", 2**30, "rdma", "mlx5_0")
    assert parse_mooncake("mooncake://m").master == "m:50051"
    assert EngineConfig(remote_url=url).remote_url == url


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://",
        "mooncake://m?x=1",
        "mooncake://:secret@m:port",
        "mooncake://:secret@m:99999",
    ],
)
def test_urls_that_cannot_work(url: str) -> None:
    with pytest.raises(ConfigError, match="mooncake://MASTER:PORT") as error:
        parse_mooncake(url)
    assert "secret" not in str(error.value)


def test_a_time_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not expire"):
        RedisTier("mooncake://m", records=RECORDS, ttl_seconds=5.0)
