"""The Redis tier against a real server: its contract, a full server, other processes, damage, settings."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.servers import RedisServer, free_port, redis_server
from kvboost.errors import ConfigError
from kvboost.extend import Tier
from kvboost.store import MemoryStore, TieredStore
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.redis.tier import RedisTier
from kvboost.store.tiers.remote import RefusedError
from kvboost.types import Chunk, Namespace, PutOutcome
from tests.contracts import TierContract
from tests.contracts.blocks import assert_same, block_of, namespace
from tests.contracts.content import prompt
from tests.helpers.redis_writer import numbered


def open_tier(server: RedisServer, *, of: Namespace | None = None, **options: Any) -> RedisTier:
    """Patient, as the machine may be busy."""
    records = options.pop("records", None) or RecordFormat(of or namespace())
    return RedisTier(server.url, records=records, **{"timeout_s": 30.0, **options})


def keys(chunks: Sequence[Chunk]) -> list[bytes]:
    return [chunk.prefix_key for chunk in chunks]


def store_all(tier: RedisTier, chunks: Sequence[Chunk]) -> list[PutOutcome]:
    return [tier.store(block_of(chunk)) for chunk in chunks]


def names_in(client: Any, pattern: str = "*") -> list[bytes]:
    return sorted(client.keys(pattern))


def value_names(client: Any) -> list[bytes]:
    return list(client.scan_iter("kvboost:*", _type="string"))


@pytest.fixture
def client(redis_at: RedisServer) -> Iterator[Any]:
    import redis

    with redis.Redis.from_url(redis_at.url) as opened:
        yield opened


class TestRedisTierContract(TierContract):
    has_limit = counts = False

    @pytest.fixture(autouse=True)
    def _server(self, redis_at: RedisServer) -> None:
        self.server = redis_at

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        return RedisTier(self.server.url, records=RecordFormat(namespace), timeout_s=30.0)


# Values


@pytest.mark.parametrize("size", [10, 2**20, 5 * 2**20 + 17])
@pytest.mark.parametrize("secret", [False, True])
def test_blocks_of_any_size_come_back(redis_at: RedisServer, client: Any, size: int, secret: bool) -> None:
    records = RecordFormat(namespace(), encryption_key=b"e" * 32 if secret else None)
    tier = open_tier(redis_at, records=records)
    blocks = [block_of(chunk, size) for chunk in prompt("a", "b", "c", "d", "e")]
    assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
    for found, block in zip(tier.load([block.key for block in blocks]), blocks, strict=True):
        assert_same(found, block)
    values = [client.get(name) for name in value_names(client)]
    assert sorted(map(len, values)) == [records.size_of(block) for block in blocks], "a record is not one value"
    tier.close()


def test_small_and_large_blocks_come_in_the_order_asked_for(redis_at: RedisServer) -> None:
    tier = open_tier(redis_at)
    chunks = prompt(*"abcdefghij")
    sizes = [10, 3 * 2**20, 10, 10, 2**21, 2**21, 2**21, 10, 2**21, 10]
    blocks = [block_of(chunk, size) for chunk, size in zip(chunks, sizes, strict=True)]
    for block in blocks[:4] + blocks[5:]:
        tier.store(block)
    order = list(range(10)) * 2
    random.Random(0).shuffle(order)
    for found, at in zip(tier.load([blocks[at].key for at in order]), order, strict=True):
        if at == 4:
            assert found is None
        else:
            assert_same(found, blocks[at])
    tier.close()


# A server that is full


@pytest.fixture
def full(client: Any) -> Iterator[Any]:
    """The server with 24 MB at most, least recently used first."""
    before = client.config_get("maxmemory")["maxmemory"]
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 24 * 2**20)
    client.config_set("maxmemory-samples", 64)  # nearly the true order, for a server of a few values
    yield client
    client.config_set("maxmemory", before)
    client.config_set("maxmemory-samples", 5)


def test_a_full_server_goes_on_storing_and_evicts_by_itself(redis_at: RedisServer, full: Any) -> None:
    tier = open_tier(redis_at)
    blocks = [block_of(prompt(f"text {number}")[0], 2**20) for number in range(60)]
    assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
    assert int(full.info("stats")["evicted_keys"]) > 0
    assert full.info("memory")["used_memory"] <= 2 * 24 * 2**20
    found = list(tier.load([block.key for block in blocks]))
    assert 10 < sum(block is not None for block in found) < 30
    assert_same(found[-1], blocks[-1])
    assert tier.health() == {}
    tier.close()


def test_a_prompt_goes_from_its_end(redis_at: RedisServer, full: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis' clock ticks once a second: a touch of each chunk is a second later here than that of its successor."""
    tier = open_tier(redis_at)
    chunks = prompt(*"abcd")
    for chunk in chunks:
        assert tier.store(block_of(chunk, 2**20)) is PutOutcome.STORED
    touch = tier._values.touch

    def slowly(names: Sequence[str]) -> list[bool]:
        there = []
        for name in names:
            there += touch([name])
            time.sleep(1.1)
        return there

    monkeypatch.setattr(tier._values, "touch", slowly)
    tier.used(keys(chunks))
    seen = []
    for number in range(60):
        tier.store(block_of(prompt(f"new {number}")[0], 2**20))
        seen.append(sum(tier.contains(keys(chunks))))
        assert tier.contains(keys(chunks)) == [at < seen[-1] for at in range(4)], "not from its end"
    assert set(seen) >= {4, 0}
    tier.close()


def test_asking_what_is_there_is_no_use(redis_at: RedisServer, client: Any) -> None:
    tier = open_tier(redis_at)
    (chunk,) = prompt("a")
    tier.store(block_of(chunk))
    time.sleep(2.1)
    (name,) = value_names(client)
    assert tier.contains(keys([chunk])) == [True]
    tier.stats()
    assert client.object("idletime", name) >= 1, "it was made younger by a question"
    with closing(open_catalogue(redis_at.url)) as catalogue:
        (entry,) = catalogue.entries()
    assert entry.used_at is not None
    assert entry.used_at < time.time() - 1, "listed as used by who lists it"
    tier.used(keys([chunk]))
    assert client.object("idletime", name) == 0
    tier.close()


def test_a_server_that_does_not_evict_is_told_of_once(redis_at: RedisServer, client: Any) -> None:
    limit = client.config_get("maxmemory")["maxmemory"]
    try:
        client.config_set("maxmemory", 0)
        with pytest.warns(RuntimeWarning, match="no maxmemory.*config set maxmemory-policy allkeys-lru") as seen:
            tier = open_tier(redis_at)
        assert len(seen) == 1
        assert store_all(tier, prompt("a")) == [PutOutcome.STORED]  # and it is not said again
        tier.close()
        client.config_set("maxmemory", 2**30)
        client.config_set("maxmemory-policy", "noeviction")
        with pytest.warns(RuntimeWarning, match="noeviction.*refuses what is new"):
            open_tier(redis_at).close()
        client.config_set("maxmemory-policy", "volatile-lru")
        open_tier(redis_at).close()  # values have a time limit
        with pytest.warns(RuntimeWarning, match="volatile-lru"):
            open_tier(redis_at, ttl_seconds=None).close()
    finally:
        client.config_set("maxmemory", limit)
        client.config_set("maxmemory-policy", "allkeys-lru")


def test_a_server_that_may_not_be_asked_for_its_memory_is_used(redis_at: RedisServer, client: Any) -> None:
    client.acl_setuser("shy", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-info"])
    url = redis_at.url.replace("redis://", "redis://shy:pw@")
    with pytest.warns(RuntimeWarning, match="no right to tell its memory limit") as seen:
        tier = RedisTier(url, records=RecordFormat(namespace()), timeout_s=30.0)
    assert store_all(tier, prompt("a", "b")) == [PutOutcome.STORED] * 2
    assert len(seen) == 1
    assert tier.is_available
    tier.close()
    client.acl_deluser("shy")


# Time


def test_blocks_go_when_their_time_is_over(redis_at: RedisServer, client: Any) -> None:
    tier = open_tier(redis_at, ttl_seconds=1.0)
    block = block_of(prompt("a")[0], 3 * 2**20)
    tier.store(block)
    names = names_in(client)
    assert len(names) == 2, "a record and a pointer"
    assert all(0 < client.pttl(name) <= 1000 for name in names)
    time.sleep(1.1)
    assert list(tier.load([block.key])) == [None]
    assert value_names(client) == []
    assert tier.variants([block.content_key]) == [[]]
    assert tier.store(block) is PutOutcome.STORED
    tier.close()


@pytest.mark.parametrize(("given", "left"), [({}, 7 * 24 * 3600), ({"ttl_seconds": None}, -1)])
def test_blocks_stay_a_week_or_for_ever(redis_at: RedisServer, client: Any, given: Any, left: int) -> None:
    tier = open_tier(redis_at, **given)
    tier.store(block_of(prompt("a")[0]))
    assert [client.ttl(name) for name in names_in(client)] == [pytest.approx(left, abs=5)] * 2
    tier.close()


# Others


@pytest.fixture
def writer(redis_at: RedisServer) -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.helpers.redis_writer", redis_at.url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_killed_writers_leave_no_half_block_and_lose_nothing(
    redis_at: RedisServer, writer: subprocess.Popen[str]
) -> None:
    """Another process's blocks are found here to the bit; the one it was writing when it was killed is a miss."""
    assert writer.stdin is not None
    assert writer.stdout is not None
    chooser = random.Random(0)
    tier = open_tier(redis_at)
    halves = 0
    for number in range(8):
        writer.stdin.write(f"{number * 1000}\n")
        writer.stdin.flush()
        stored: list[int] = []
        pid = 0
        wanted = chooser.randint(1, 3)
        for line in writer.stdout:
            word, _, figure = line.strip().partition(" ")
            if word == "pid":
                pid = int(figure)
            elif word == "ended":
                break
            else:
                stored.append(int(figure))
            if pid and len(stored) == wanted:
                time.sleep(chooser.random() * 0.01)
                os.kill(pid, signal.SIGKILL)
        begun = range(number * 1000, stored[-1] + 3)
        for at, found in zip(begun, tier.load([numbered(at).key for at in begun]), strict=True):
            if found is not None:
                assert_same(found, numbered(at))
            else:
                assert at not in stored, "a block that was acknowledged is gone"
                halves += at == stored[-1] + 1
        tier.clear()
    assert halves, "nobody was killed while writing"
    assert tier.stats().rejected == 0, "half a block was looked at"
    tier.close()


def test_a_tenant_can_be_purged_of_all_its_models(redis_at: RedisServer, client: Any) -> None:
    tiers = [open_tier(redis_at, of=namespace(model, tenant=who)) for who in ("a", "b") for model in ("x", "y")]
    for tier in tiers:
        store_all(tier, prompt("a", "b"))
    tiers[3].purge(namespace(tenant="a").tenant)
    assert [sum(tier.contains(keys(prompt("a", "b")))) for tier in tiers] == [0, 0, 2, 2]
    assert names_in(client, f"*{namespace(tenant='a').tenant.hex()}*") == []
    for tier in tiers:
        tier.close()


# Damage


def test_every_corruption_is_a_miss(redis_at: RedisServer, client: Any) -> None:
    """Flipped bytes anywhere, in small blocks and in large ones. More: benchmark redis_bit_flips."""
    chooser = random.Random(0)
    tier = open_tier(redis_at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(150):
            block = block_of(prompt(f"{turn}")[0], chooser.choice([100, 10_000, 2**20]))
            tier.store(block)
            name = chooser.choice(value_names(client))
            at = chooser.randrange(client.strlen(name))
            old = client.getrange(name, at, at)
            client.setrange(name, at, bytes((old[0] ^ 1 << chooser.randrange(8),)))
            assert list(tier.load([block.key])) == [None], f"a flipped bit at {at} of {name!r} was not seen"
            assert tier.contains([block.key]) == [False], "a damaged record is left there"
    assert tier.stats().rejected == 150
    tier.close()


@pytest.mark.parametrize("value", [b"x", b"x" * 2**21, None])
def test_what_others_put_there_is_a_miss(redis_at: RedisServer, client: Any, value: bytes | None) -> None:
    tier = open_tier(redis_at)
    chunks = prompt("a", "b")
    store_all(tier, chunks)
    name = next(name for name in value_names(client) if name.endswith(chunks[0].prefix_key.hex().encode()))
    client.delete(name)
    if value is None:
        client.lpush(name, b"a list")
    else:
        client.set(name, value)
    with pytest.warns(RuntimeWarning):
        assert list(tier.load([chunks[0].prefix_key])) == [None]
    assert_same(next(iter(tier.load([chunks[1].prefix_key]))), block_of(chunks[1]))
    assert tier.is_available, "a bad value is no reason to leave the server alone"
    tier.close()


def test_records_swapped_between_keys_are_misses(redis_at: RedisServer, client: Any) -> None:
    tier = open_tier(redis_at)
    store_all(tier, prompt("a", "b"))
    first, second = value_names(client)
    values = client.get(first), client.get(second)
    client.set(first, values[1])
    client.set(second, values[0])
    with pytest.warns(RuntimeWarning, match="another key"):
        assert list(tier.load(keys(prompt("a", "b")))) == [None, None]
    tier.close()


def test_a_full_server_refuses_and_says_so_once(redis_at: RedisServer, client: Any) -> None:
    tier = open_tier(redis_at)
    limit = client.config_get("maxmemory")["maxmemory"]
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 2**20)
    try:
        with pytest.warns(RuntimeWarning, match="refused a command") as seen:
            outcomes = [tier.store(block_of(chunk, 2**20)) for chunk in prompt("a", "b", "c", "d")]
        assert PutOutcome.REFUSED in outcomes
        assert len(seen) == 1
    finally:
        client.config_set("maxmemory", limit)
        client.config_set("maxmemory-policy", "allkeys-lru")
    chunk = prompt("z")[0]
    assert tier.store(block_of(chunk)) is PutOutcome.STORED
    tier.close()


# Settings


def test_a_password_and_a_database(tmp_path: Path) -> None:
    with redis_server(["--requirepass", "open sesame"]) as server:
        url = f"redis://:open%20sesame@127.0.0.1:{server.port}/3"
        tier = RedisTier(url, records=RecordFormat(namespace()), timeout_s=30.0)
        assert store_all(tier, prompt("a")) == [PutOutcome.STORED]
        tier.close()
        with pytest.warns(RuntimeWarning, match="NOAUTH|WRONGPASS|Authentication"):
            RedisTier(server.url, records=RecordFormat(namespace()), timeout_s=30.0).close()


def test_tls(tmp_path: Path) -> None:
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*make.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=tmp_path, check=True, capture_output=True
    )
    port = free_port()
    files = {"cert": "cert.pem", "key": "key.pem", "ca-cert": "cert.pem"}
    options = [part for name, file in files.items() for part in (f"--tls-{name}-file", str(tmp_path / file))]
    with redis_server([*options, "--tls-port", str(port), "--tls-auth-clients", "no"]):
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'cert.pem'}"
        tier = RedisTier(url, records=RecordFormat(namespace()), timeout_s=30.0)
        blocks = [numbered(number) for number in range(3)]
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        for found, block in zip(tier.load([block.key for block in blocks]), blocks, strict=True):
            assert_same(found, block)
        tier.close()
        with pytest.warns(RuntimeWarning, match="certificate"):
            RedisTier(f"rediss://127.0.0.1:{port}/0", records=RecordFormat(namespace()), timeout_s=30.0).close()


@pytest.mark.parametrize(
    "settings",
    [{"ttl_seconds": 0.0}, {"ttl_seconds": -1.0}, {"prefix": "a:b"}, {"prefix": ""}, {"url": "http://:secret@x"}],
)
def test_settings_that_cannot_work_are_refused(redis_at: RedisServer, settings: dict[str, Any]) -> None:
    settings = {"url": redis_at.url, **settings}
    with pytest.raises(ConfigError, match="give|must") as raised:
        RedisTier(settings.pop("url"), records=RecordFormat(namespace()), **settings)
    assert "secret" not in str(raised.value)


def test_without_redis_py_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r'its extra redis \(in a checkout: pip install "\.\[redis\]"\)'):
        RedisTier("redis://127.0.0.1", records=RecordFormat(namespace()))


def test_blocks_that_no_record_can_hold_are_refused(redis_at: RedisServer) -> None:
    tier = open_tier(redis_at, records=RecordFormat(namespace(), max_bytes=2**20))
    with pytest.warns(RuntimeWarning, match="use smaller chunks"):
        assert tier.store(block_of(prompt("a")[0], 2**21)) is PutOutcome.REFUSED
    odd = replace(block_of(prompt("a")[0]), tensors=(torch.zeros(2, dtype=torch.complex64),), nbytes=16)
    assert tier.store(odd) is PutOutcome.REFUSED
    assert tier.stats().refused == 2
    tier.close()


def test_loads_that_are_given_up_leave_nothing_under_way(redis_at: RedisServer) -> None:
    tier = open_tier(redis_at)
    blocks = [numbered(number) for number in range(6)]
    for block in blocks:
        tier.store(block)
    for taken in (0, 1, 2):
        loading = iter(tier.load([block.key for block in blocks]))
        for _ in range(taken):
            next(loading)
        del loading
    threads = sum(thread.name.startswith("kvboost-redis") for thread in threading.enumerate())
    assert threads <= 8, "a thread for each load"
    for found, block in zip(tier.load([block.key for block in blocks]), blocks, strict=True):
        assert_same(found, block)
    tier.close()


def test_what_the_server_lost_is_written_again_by_who_still_has_it(redis_at: RedisServer, client: Any) -> None:
    """Who has a prompt in memory never stores it again, and others would miss its beginning for ever."""
    chunks = prompt(*"abcd")
    other = open_tier(redis_at)
    with closing(other), closing(TieredStore(MemoryStore(2**30), [open_tier(redis_at)])) as store:
        for chunk in chunks:
            store.put(block_of(chunk))
        store.used(keys(chunks))
        store.flush()
        for name in value_names(client)[1:]:
            client.delete(name)
        assert other.contains(keys(chunks)).count(True) == 1
        store.used(keys(chunks))
        store.flush()
        assert other.contains(keys(chunks)) == [True] * 4


def test_a_batch_that_was_refused_shifts_no_other(redis_at: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(redis_at)
    blocks = [block_of(chunk, 3 * 2**20) for chunk in prompt(*"abc")]
    for block in blocks:
        tier.store(block)
    execute, gets = tier._values._execute, 0

    def refused(commands: Any, _: object = None) -> list[Any]:
        nonlocal gets
        gets += (is_get := commands[0][0] == "GET")
        if is_get and gets == 1:
            raise RefusedError("not this one")
        return execute(commands)

    monkeypatch.setattr(tier._values, "_execute", refused)
    with pytest.warns(RuntimeWarning, match="refused a command"):
        first, *others = tier.load([block.key for block in blocks])
    assert first is None
    for found, block in zip(others, blocks[1:], strict=True):
        assert_same(found, block)
    tier.close()
