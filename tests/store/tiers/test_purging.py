"""Purging finds every tenant in a place, also those nobody knows any more, and touches little else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.common.servers import RedisServer
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from tests.contracts.blocks import block_of
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
    tier.purge(None)
    assert tier.stats().chunks == 0
    tier.close()
    assert records_in(place) == 0
    for records in (ACME, REVOKED):
        place.fill(records, blocks_of("a", "b"))
    catalogue = open_catalogue(place.url)
    assert catalogue.purge(None) == 4
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
    tier.purge(None)
    assert client.dbsize() == 5000
    tier.close()
