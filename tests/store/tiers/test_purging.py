"""Purging finds every tenant in a place, also those nobody knows any more, and touches little else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.common.servers import RedisServer
from kvboost.store import MemoryStore, RedisTier, TieredStore
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.s3 import ObjectTier, _ObjectBackend
from kvboost.testing.blocks import block_of, namespace
from kvboost.testing.content import prompt
from tests.helpers.places import Place, blocks_of, of

ACME, OTHER = RecordFormat(of("model", "acme")), RecordFormat(of("model", "other"))
REVOKED = RecordFormat(of("another model", "a key of last year"))


def records_in(place: Place) -> int:
    catalogue = open_catalogue(place.url)
    try:
        return sum(1 for _ in catalogue.entries())
    finally:
        catalogue.close()


def test_all_tenants_go_also_those_that_nobody_knows_any_more(place: Place) -> None:
    for records in (ACME, OTHER, REVOKED):
        place.fill(records, blocks_of("a", "b"))
    tier = place.tier(ACME)
    tier.purge_all()
    assert tier.stats().chunks == 0
    tier.close()
    assert records_in(place) == 0
    for records in (ACME, REVOKED):
        place.fill(records, blocks_of("a", "b"))
    catalogue = open_catalogue(place.url)
    assert catalogue.purge_all() == 4
    catalogue.close()
    assert records_in(place) == 0


@pytest.fixture
def client(redis_at: RedisServer) -> Iterator[Any]:
    import redis

    with redis.Redis.from_url(redis_at.url) as opened:
        yield opened


def scans(client: Any) -> int:
    return int(client.info("commandstats").get("cmdstat_scan", {"calls": 0})["calls"])


def test_a_purge_does_not_scan_the_database(redis_at: RedisServer, client: Any) -> None:
    """Other programs may have millions of keys there."""
    place = Place("redis", redis_at.url)
    client.mset({f"of another program {number}": "x" for number in range(5000)})
    tier = place.tier(ACME)
    for number in range(150):
        tier.store(block_of(prompt(f"text {number}")[0]))
    tier._sweep()  # what the first write began in the background
    place.fill(OTHER, blocks_of("a", "b"))
    place.fill(REVOKED, blocks_of("a"))
    before, listed = scans(client), client.info("commandstats").get("cmdstat_hscan", {"calls": 0})["calls"]
    tier.purge(ACME.namespace.tenant)
    assert tier.stats().chunks == 0
    assert scans(client) == before, "the whole database was scanned"
    assert client.info("commandstats")["cmdstat_hscan"]["calls"] == listed + 1, "more than the list of spaces was read"
    assert records_in(place) == 3
    assert client.dbsize() > 5000
    catalogue = open_catalogue(place.url)
    assert catalogue.purge(OTHER.namespace.tenant) == 2
    catalogue.close()
    assert scans(client) == before
    tier.close()


@pytest.mark.parametrize("dropped", ["kvboost:ledger:of:*", "kvboost:ledger", "kvboost:ledger*"])
def test_a_purge_finds_what_a_broken_ledger_does_not_list(redis_at: RedisServer, client: Any, dropped: str) -> None:
    place = Place("redis", redis_at.url)
    place.fill(ACME, blocks_of("a", "b"))
    client.delete(*client.keys(dropped))
    tier = place.tier(ACME)
    tier.purge(ACME.namespace.tenant)
    tier.close()
    left = [name for name in client.scan_iter("kvboost:*", _type="string") if b":ledger:" not in name]
    assert left == []


def test_a_lookup_in_a_bucket_stops_at_the_first_miss(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    size = _ObjectBackend.size

    def counted(self: _ObjectBackend, path: str) -> int | None:
        asked.append(path)
        return size(self, path)

    tier = ObjectTier(s3_url, records=RecordFormat(namespace()), timeout_s=30.0)
    chunks = prompt(*map(str, range(200)))
    for chunk in chunks[:3]:
        tier.store(block_of(chunk))
    monkeypatch.setattr(_ObjectBackend, "size", counted)
    store = TieredStore(MemoryStore(10**6), [tier])
    assert store.leading_run(chunks) == 3
    assert 4 <= len(asked) <= 4 + tier._backend.ahead
    asked.clear()
    lease = store.lease(chunks)
    assert len(lease.blocks) == 3
    assert len(asked) <= 4 + tier._backend.ahead
    lease.release()
    store.close()


def test_a_whole_run_in_a_bucket_is_found(s3_url: str) -> None:
    tier = ObjectTier(s3_url, records=RecordFormat(namespace()), timeout_s=30.0)
    chunks = prompt(*map(str, range(20)))
    for chunk in chunks:
        tier.store(block_of(chunk))
    assert tier.leading_run([chunk.prefix_key for chunk in chunks]) == 20
    assert tier.leading_run([]) == 0
    tier.close()


def test_a_ledger_counts_each_space_by_its_list(redis_at: RedisServer, client: Any) -> None:
    tier = RedisTier(redis_at.url, capacity_bytes=2**30, records=ACME, timeout_s=30.0)
    for block in blocks_of("a", "b", "c"):
        tier.store(block)
    tier.remove([blocks_of("a", "b", "c")[2].key])
    (listed,) = client.keys("kvboost:ledger:of:*")
    assert client.scard(listed) == tier.stats().chunks == 2
    tier.close()
