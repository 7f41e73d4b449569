"""The Redis tier against a real server: its contract, who goes first, other processes, damage, settings."""

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.servers import RedisServer, free_port, redis_server
from kvboost.errors import ConfigError
from kvboost.extend import Tier
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.redis.loading import PIECE_BYTES, split
from kvboost.store.tiers.redis.tier import RedisTier
from kvboost.testing import TierContract
from kvboost.testing.blocks import assert_same, block_of, namespace
from kvboost.testing.content import prompt
from kvboost.types import Chunk, Namespace, PutOutcome
from tests.helpers.places import set_limit
from tests.helpers.redis_writer import numbered

EACH = RecordFormat(namespace()).size_of(block_of(prompt("a")[0])) + 4096
"""What the blocks of these tests take: a record and an entry."""


def open_tier(server: RedisServer, *, room: int = 1000, of: Namespace | None = None, **options: Any) -> RedisTier:
    """Patient, as the machine may be busy."""
    records = options.pop("records", None) or RecordFormat(of or namespace())
    return RedisTier(server.url, capacity_bytes=room * EACH, records=records, **{"timeout_s": 30.0, **options})


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
    @pytest.fixture(autouse=True)
    def _server(self, redis_at: RedisServer) -> None:
        self.server = redis_at

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        set_limit(self.server.url, capacity_bytes)
        return RedisTier(
            self.server.url, capacity_bytes=capacity_bytes, records=RecordFormat(namespace), timeout_s=30.0
        )


# Pieces


@pytest.mark.parametrize("size", [10, PIECE_BYTES - 8192, PIECE_BYTES, 5 * 2**20 + 17])
@pytest.mark.parametrize("secret", [False, True])
def test_blocks_of_any_size_come_back(redis_at: RedisServer, client: Any, size: int, secret: bool) -> None:
    records = RecordFormat(namespace(), encryption_key=b"e" * 32 if secret else None)
    tier = open_tier(redis_at, room=10**6, records=records)
    blocks = [block_of(chunk, size) for chunk in prompt("a", "b", "c", "d", "e")]
    assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
    for found, block in zip(tier.load([block.key for block in blocks]), blocks, strict=True):
        assert_same(found, block)
    assert max(client.strlen(name) for name in value_names(client)) <= PIECE_BYTES
    assert len(value_names(client)) == {10: 5, PIECE_BYTES - 8192: 5, PIECE_BYTES: 15}.get(size, 5 * 7)
    assert all(client.ttl(name) == -1 for name in value_names(client)), "a block without a time limit has one"
    tier.close()


def test_small_and_large_blocks_come_in_the_order_asked_for(redis_at: RedisServer) -> None:
    tier = open_tier(redis_at, room=10**6)
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


def test_pieces_together_are_the_record() -> None:
    record = RecordFormat(namespace()).encode(numbered(0))
    pieces = split(record.parts, record.nbytes)
    assert b"".join(part for piece in pieces for part in piece) == record.join()
    assert [sum(map(len, piece)) for piece in pieces[1:-1]] == [PIECE_BYTES] * (len(pieces) - 2)


@pytest.mark.parametrize("gone", ["first", "second", "last"])
def test_a_block_with_a_piece_missing_is_a_miss_and_can_be_stored_again(
    redis_at: RedisServer, client: Any, gone: str
) -> None:
    """As when the server evicts something."""
    tier = open_tier(redis_at)
    block = block_of(prompt("a")[0], 3 * 2**20)
    tier.store(block)
    first, *others = sorted(value_names(client), key=len)
    client.delete({"first": first, "second": sorted(others)[0], "last": sorted(others)[-1]}[gone])
    assert list(tier.load([block.key])) == [None]
    tier.flush()
    assert (tier.stats().chunks, tier.stats().bytes) == (0, 0), "a block that is gone is counted"
    assert tier.store(block) is PutOutcome.STORED
    assert_same(next(iter(tier.load([block.key]))), block)
    tier.close()


# Who goes first


def test_the_least_recently_used_prompt_goes_first_from_its_end(redis_at: RedisServer) -> None:
    tier = open_tier(redis_at, room=5)
    old, young = prompt("a", "b", "c"), prompt("x", "y")
    for chunks in (old, young):
        store_all(tier, chunks)
        tier.used(keys(chunks))
    for number, left in enumerate((2, 1, 0)):
        store_all(tier, prompt(f"new {number}"))
        assert tier.contains(keys(old)) == [i < left for i in range(3)]
        assert tier.contains(keys(young)) == [True, True]
    tier.close()


def test_one_budget_for_all_namespaces_and_a_quota_for_each_tenant(redis_at: RedisServer) -> None:
    first = open_tier(redis_at, room=4, tenant_quota_bytes=3 * EACH)
    other = open_tier(redis_at, room=4, of=namespace(tenant="other"), tenant_quota_bytes=3 * EACH)
    for word in "abcde":
        store_all(first, prompt(word))
    assert first.stats().chunks == 3, "the quota"
    for word in "vw":
        store_all(other, prompt(word))
    assert (first.stats().chunks, other.stats().chunks) == (2, 2), "the budget of all"
    assert first.prefix_bytes() == 4 * EACH
    first.close()
    other.close()


def test_the_ledger_is_never_over_and_right_in_the_end(redis_at: RedisServer, client: Any) -> None:
    """Six threads over two processes' worth of tiers; what lies there is what is counted."""
    tiers = [open_tier(redis_at, room=10) for _ in range(2)]
    over: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            held = int(client.hget("kvboost:ledger", "bytes") or 0)
            if held > 10 * EACH:
                over.append(held)

    def work(seed: int) -> None:
        chooser = random.Random(seed)
        tier = tiers[seed % 2]
        for _ in range(40):
            chunks = prompt(*chooser.choices("abcd", k=chooser.randint(1, 4)))
            for found, chunk in zip(tier.load(keys(chunks)), chunks, strict=True):
                if found is not None:
                    assert_same(found, block_of(chunk))
            store_all(tier, chunks)
            tier.used(keys(chunks))
            if chooser.random() < 0.1:
                tier.remove(keys(chunks)[-1:])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert over == []
    held = int(client.hget("kvboost:ledger", "bytes"))
    assert held == len(value_names(client)) * EACH == tiers[0].stats().bytes
    assert client.zcard("kvboost:ledger:recency") == client.hlen("kvboost:ledger:entries") == held // EACH
    for tier in tiers:
        tier.clear()
        tier.close()
    assert names_in(client) == [b"kvboost:ledger", b"kvboost:ledger:place"], "something is left of what was cleared"


# Time


def test_blocks_go_when_their_time_is_over(redis_at: RedisServer, client: Any) -> None:
    tier = open_tier(redis_at, ttl_seconds=1.0)
    block = block_of(prompt("a")[0], 3 * 2**20)
    tier.store(block)
    assert all(0 < client.pttl(name) <= 1000 for name in value_names(client))
    assert tier.stats().chunks == 1
    time.sleep(1.1)
    assert list(tier.load([block.key])) == [None]
    assert (tier.stats().chunks, tier.stats().bytes) == (0, 0)
    assert tier.variants([block.content_key]) == [[]]
    assert tier.store(block) is PutOutcome.STORED
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
    tier = open_tier(redis_at, room=10**6)
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
    assert [tier.stats().chunks for tier in tiers] == [0, 0, 2, 2]
    assert names_in(client, f"*{namespace(tenant='a').tenant.hex()}*") == []
    for tier in tiers:
        tier.close()


# Damage


def test_every_corruption_is_a_miss(redis_at: RedisServer, client: Any) -> None:
    """Flipped bytes anywhere, in small blocks and in pieces of large ones. More: benchmark redis_bit_flips."""
    chooser = random.Random(0)
    tier = open_tier(redis_at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(150):
            block = block_of(prompt(f"{turn}")[0], chooser.choice([100, 10_000, PIECE_BYTES + 5000]))
            tier.store(block)
            name = chooser.choice(value_names(client))
            at = chooser.randrange(client.strlen(name))
            old = client.getrange(name, at, at)
            client.setrange(name, at, bytes((old[0] ^ 1 << chooser.randrange(8),)))
            assert list(tier.load([block.key])) == [None], f"a flipped bit at {at} of {name!r} was not seen"
            assert tier.contains([block.key]) == [False], "a damaged record is left there"
    assert tier.stats().rejected == 150
    assert tier.stats().bytes == 0
    tier.close()


@pytest.mark.parametrize("value", [b"", b"x", b"x" * 2**21, None])
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


@pytest.mark.parametrize("dropped", ["", ":entries", ":recency", ":due", ":leaves"])
def test_a_ledger_that_the_server_dropped_in_part_begins_anew(redis_at: RedisServer, client: Any, dropped: str) -> None:
    tier = open_tier(redis_at, room=5)
    store_all(tier, prompt(*"abcde"))
    client.delete("kvboost:ledger" + dropped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(4):
            store_all(tier, prompt(f"new {number}"))
    for _ in range(100):  # a sweep goes on in the background
        if len(value_names(client)) == tier.stats().chunks:
            break
        time.sleep(0.05)
    assert len(value_names(client)) == tier.stats().chunks <= 5, "blocks lie there that nobody counts"
    assert store_all(tier, prompt("last")) == [PutOutcome.STORED]
    tier.close()


def test_a_full_server_refuses_and_says_so_once(redis_at: RedisServer, client: Any) -> None:
    tier = open_tier(redis_at)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 2**20)
    try:
        with pytest.warns(RuntimeWarning, match="refused a command") as seen:
            outcomes = [tier.store(block_of(chunk, 2**20)) for chunk in prompt("a", "b", "c", "d")]
        assert PutOutcome.REFUSED in outcomes
        assert len(seen) == 1
    finally:
        client.config_set("maxmemory", 0)
    chunk = prompt("z")[0]
    assert tier.store(block_of(chunk)) is PutOutcome.STORED
    tier.close()


# Settings


def test_a_password_and_a_database(tmp_path: Path) -> None:
    with redis_server(["--requirepass", "open sesame"]) as server:
        url = f"redis://:open%20sesame@127.0.0.1:{server.port}/3"
        tier = RedisTier(url, capacity_bytes=10**6, records=RecordFormat(namespace()), timeout_s=30.0)
        assert store_all(tier, prompt("a")) == [PutOutcome.STORED]
        tier.close()
        with pytest.warns(RuntimeWarning, match="NOAUTH|WRONGPASS|Authentication"):
            RedisTier(server.url, capacity_bytes=10**6, records=RecordFormat(namespace()), timeout_s=30.0).close()


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
        tier = RedisTier(url, capacity_bytes=10**9, records=RecordFormat(namespace()), timeout_s=30.0)
        blocks = [numbered(number) for number in range(3)]
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        for found, block in zip(tier.load([block.key for block in blocks]), blocks, strict=True):
            assert_same(found, block)
        tier.close()
        with pytest.warns(RuntimeWarning, match="certificate"):
            RedisTier(
                f"rediss://127.0.0.1:{port}/0", capacity_bytes=1, records=RecordFormat(namespace()), timeout_s=30.0
            ).close()


@pytest.mark.parametrize(
    "settings",
    [{"ttl_seconds": 0.0}, {"ttl_seconds": -1.0}, {"prefix": "a:b"}, {"prefix": ""}, {"url": "http://:secret@x"}],
)
def test_settings_that_cannot_work_are_refused(redis_at: RedisServer, settings: dict[str, Any]) -> None:
    settings = {"url": redis_at.url, **settings}
    with pytest.raises(ConfigError, match="give|must") as raised:
        RedisTier(settings.pop("url"), capacity_bytes=1, records=RecordFormat(namespace()), **settings)
    assert "secret" not in str(raised.value)


def test_without_redis_py_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r'its extra redis \(in a checkout: pip install "\.\[redis\]"\)'):
        RedisTier("redis://127.0.0.1", capacity_bytes=1, records=RecordFormat(namespace()))


def test_blocks_that_no_record_can_hold_are_refused(redis_at: RedisServer) -> None:
    tier = open_tier(redis_at, records=RecordFormat(namespace(), max_bytes=2**20))
    with pytest.warns(RuntimeWarning, match="use smaller chunks"):
        assert tier.store(block_of(prompt("a")[0], 2**21)) is PutOutcome.REFUSED
    odd = replace(block_of(prompt("a")[0]), tensors=(torch.zeros(2, dtype=torch.complex64),), nbytes=16)
    assert tier.store(odd) is PutOutcome.REFUSED
    assert tier.stats().refused == 2
    tier.close()


def test_no_thread_is_left_by_loads_that_are_given_up(redis_at: RedisServer) -> None:
    tier = open_tier(redis_at, room=10**6)
    blocks = [numbered(number) for number in range(6)]
    for block in blocks:
        tier.store(block)
    for taken in (0, 1, 2):
        loading = iter(tier.load([block.key for block in blocks]))
        for _ in range(taken):
            next(loading)
        del loading
    for _ in range(500):
        if not any(thread.name == "kvboost-redis-load" for thread in threading.enumerate()):
            break
        time.sleep(0.01)
    else:
        raise AssertionError("a thread goes on loading for nobody")
    tier.close()
