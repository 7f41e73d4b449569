"""The object tier against an S3-compatible server over a real socket: its contract, damage, a server that is gone."""

from __future__ import annotations

import sys
import time
import uuid
import warnings
from typing import Any

import pytest

from benchmarks.common.faults import Fault, FaultyProxy
from kvboost.errors import ConfigError
from kvboost.extend import Tier
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.buckets import CAPACITY
from kvboost.store.tiers.s3 import ObjectTier
from kvboost.types import Namespace, PutOutcome
from tests.contracts import TierContract
from tests.contracts.blocks import assert_same, block_of, namespace
from tests.contracts.content import prompt
from tests.helpers.redis_writer import numbered


def _keys(port: int, prefix: str = "") -> dict[str, str]:
    region = {"region_name": "us-east-1"} if prefix else {"region": "us-east-1"}
    return {prefix + "access_key_id": "test", prefix + "secret_access_key": "test", **region}


def open_tier(port: int, folder: str, *, of: Namespace | None = None, **options: Any) -> ObjectTier:
    config = {**_keys(port), "endpoint": f"http://127.0.0.1:{port}", "client_options": {"allow_http": True}}
    options = {"timeout_s": 30.0, **options}
    return ObjectTier(f"s3://bucket/{folder}", records=RecordFormat(of or namespace()), config=config, **options)


@pytest.fixture
def folder() -> str:
    return uuid.uuid4().hex


class TestObjectTierContract(TierContract):
    evicts = False

    @pytest.fixture(autouse=True)
    def _bucket(self, s3: int, folder: str) -> None:
        self.port, self.folder = s3, folder

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        tier = open_tier(self.port, self.folder, of=namespace, capacity_bytes=capacity_bytes)
        tier._backend.objects.put(CAPACITY, b"%d" % capacity_bytes)
        return tier


def test_large_blocks_come_back_and_there_is_no_limit(s3: int, folder: str) -> None:
    tier = open_tier(s3, folder)
    blocks = [numbered(number) for number in range(3)]
    assert [tier.store(block) for block in blocks] == [PutOutcome.STORED] * 3
    for found, block in zip(tier.load([block.key for block in blocks]), blocks, strict=True):
        assert_same(found, block)
    assert tier.stats().capacity_bytes > 10**18
    tier.close()


def test_damaged_and_foreign_objects_are_misses(s3: int, folder: str) -> None:
    import obstore
    from obstore.store import from_url

    tier = open_tier(s3, folder)
    chunks = prompt("a", "b", "c")
    for chunk in chunks:
        tier.store(block_of(chunk))
    config: Any = {**_keys(s3), "endpoint": f"http://127.0.0.1:{s3}"}
    raw = from_url(f"s3://bucket/{folder}", config=config, client_options={"allow_http": True})
    paths = [entry["path"] for page in obstore.list(raw) for entry in page if entry["path"].endswith(".kv")]
    values = {path: bytearray(obstore.get(raw, path).bytes()) for path in paths}
    values[paths[0]][-1] ^= 1
    values[paths[1]] = values[paths[1]][:-64]
    values[paths[2]] = bytearray(b"none of ours")
    for path, value in values.items():
        obstore.put(raw, path, bytes(value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert list(tier.load([chunk.prefix_key for chunk in chunks])) == [None] * 3
    assert (tier.stats().rejected, tier.stats().chunks) == (3, 0)
    assert tier.variants([chunk.content_key for chunk in chunks]) == [[], [], []]
    tier.close()


def test_a_tenant_can_be_purged(s3: int, folder: str) -> None:
    tiers = [open_tier(s3, folder, of=namespace(model, tenant=who)) for who in ("a", "b") for model in ("x", "y")]
    for tier in tiers:
        tier.store(block_of(prompt("a")[0]))
    tiers[3].purge(namespace(tenant="a").tenant)
    assert [tier.stats().chunks for tier in tiers] == [0, 0, 1, 1]
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.BLACK_HOLE, Fault.TRUNCATED, Fault.GARBAGE])
def test_a_store_that_is_gone_is_misses_one_warning_and_used_again_later(s3: int, folder: str, fault: Fault) -> None:
    block = block_of(prompt("a")[0], 10**6)
    with FaultyProxy(s3) as proxy:
        tier = open_tier(proxy.port, folder, timeout_s=3.0)
        assert tier.store(block) is PutOutcome.STORED
        proxy.fault = fault
        with pytest.warns(RuntimeWarning, match="check the bucket") as seen:
            assert list(tier.load([block.key] * 3)) == [None] * 3
        assert len(seen) == 1
        assert "\n" not in str(seen[0].message)
        took = []
        for _ in range(3):  # a busy machine stands still now and then; the store is gone each time
            begin = time.perf_counter()
            for _ in range(100):
                assert list(tier.load([block.key])) == [None]
                assert tier.contains([block.key]) == [False]
            took.append(time.perf_counter() - begin)
        assert min(took) < 0.5, "requests wait for a store that is gone"
        proxy.fault = Fault.NONE
        for _ in range(1000):
            if tier.contains([block.key]) == [True]:
                break
            time.sleep(0.01)
        assert_same(next(iter(tier.load([block.key]))), block)
        tier.close()


def test_a_full_namespace_is_listed_again_as_others_delete_but_not_for_every_block(
    s3: int, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = prompt(*"abcdef")
    size = RecordFormat(namespace()).size_of(block_of(chunks[0]))
    tier = open_tier(s3, folder, capacity_bytes=2 * size)
    other = open_tier(s3, folder)
    lists: list[str] = []
    pages = tier._pages
    monkeypatch.setattr(tier, "_pages", lambda prefix: (lists.append(prefix), pages(prefix))[1])
    stored = [tier.store(block_of(chunk)) for chunk in chunks[:3]]
    assert stored == [PutOutcome.STORED, PutOutcome.STORED, PutOutcome.REFUSED]
    other.clear()  # as a lifecycle rule, or another process
    assert [tier.store(block_of(chunk)) for chunk in chunks[:4]] == [PutOutcome.REFUSED] * 4
    assert len(lists) == 1, "listed again at once"
    monkeypatch.setattr("kvboost.store.tiers.s3._RELIST_S", 0.0)
    outcomes = []
    while PutOutcome.STORED not in outcomes and len(outcomes) < 500:  # the list is made in the background
        outcomes.append(tier.store(block_of(chunks[0])))
        time.sleep(0.01)
    assert outcomes[0] is PutOutcome.REFUSED, "a block waited for the list"
    monkeypatch.setattr("kvboost.store.tiers.s3._RELIST_S", 300.0)
    stored = [tier.store(block_of(chunk)) for chunk in chunks[1:3]]
    assert stored == [PutOutcome.STORED, PutOutcome.REFUSED], "the limit holds after a list, too"
    assert tier.stats().bytes == 2 * size
    for opened in (tier, other):
        opened.close()


def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="s3://BUCKET/PREFIX"):
        ObjectTier("nothing://x", records=RecordFormat(namespace()))
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r'its extra s3 \(in a checkout: pip install "\.\[s3\]"\)'):
        ObjectTier("s3://bucket/x", records=RecordFormat(namespace()))
