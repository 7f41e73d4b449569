"""Purging finds every tenant in a place, also those nobody knows any more, and touches little else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.common.servers import RedisServer
from kvboost.store import MemoryStore, TieredStore
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.s3 import ObjectTier, _ObjectBackend
from tests.contracts.blocks import block_of, namespace
from tests.contracts.content import prompt
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


def test_a_purge_leaves_other_programs_values_alone(redis_at: RedisServer, client: Any) -> None:
    place = Place("redis", redis_at.url)
    client.mset({f"of another program {number}": "x" for number in range(5000)})
    tier = place.tier(ACME)
    for number in range(150):
        tier.store(block_of(prompt(f"text {number}")[0]))
    place.fill(OTHER, blocks_of("a", "b"))
    place.fill(REVOKED, blocks_of("a"))
    tier.purge(ACME.namespace.tenant)
    assert tier.stats().chunks == 0
    assert client.keys(f"*{ACME.namespace.tenant.hex()}*") == []
    assert records_in(place) == 3
    catalogue = open_catalogue(place.url)
    assert catalogue.purge(OTHER.namespace.tenant) == 2
    catalogue.close()
    tier.purge_all()
    assert client.dbsize() == 5000
    tier.close()


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
