"""vLLM's own code on the other end of the wire: its decoder reads our events, and we read its publisher's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="needs kvboost[fleet]")
pytest.importorskip("zmq", reason="needs kvboost[fleet]")

from examples.fleet.subscriber import EventSubscriber
from kvboost.fleet.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, StoreEvents
from kvboost.fleet.publish import EventPublisher
from kvboost.store import MemoryStore
from kvboost.types import Chunk
from tests.contracts.blocks import SIZE, block_of
from tests.contracts.content import prompt
from tests.fleet.picture import Picture

from .conftest import PYTHON, engine

ANY = "tcp://127.0.0.1:0"
_SECONDS = 120.0

_READER = """
import json, struct, sys
import msgspec, zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

live, replay = (zmq.Context.instance().socket(kind) for kind in (zmq.SUB, zmq.DEALER))
live.subscribe("")
live.connect(sys.argv[1])
replay.connect(sys.argv[2])
decoder = msgspec.msgpack.Decoder(type=KVEventBatch)

def tell(topic, number, payload):
    batch = decoder.decode(payload)
    events = [(type(event).__name__, repr(event)) for event in batch.events]
    print(json.dumps([struct.unpack(">Q", number)[0], batch.data_parallel_rank, events]), flush=True)

replay.send_multipart((b"", struct.pack(">Q", 0)))
while True:
    _, topic, number, payload = replay.recv_multipart()
    if number == ZmqEventPublisher.END_SEQ:
        break
    tell(topic, number, payload)
print("ready", flush=True)
while True:
    tell(*live.recv_multipart())
"""

_WRITER = """
import sys, time
from vllm.distributed.kv_events import *

publisher = ZmqEventPublisher(0, *sys.argv[1:], buffer_steps=4)

def publish(*events):
    publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

publish(
    BlockStored(
        block_hashes=[b"a" * 32, 7], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=2, lora_id=None,
        medium="GPU", lora_name="x", extra_keys=[("salt",), None], group_idx=0, session_id="s",
    )
)
publish(BlockRemoved(block_hashes=[b"a" * 32], medium="GPU"), AllBlocksCleared())
print("ready", flush=True)
for number, line in enumerate(sys.stdin):
    publish(BlockRemoved(block_hashes=[number], medium=None))
publisher.shutdown()
"""


@pytest.fixture
def run() -> Any:
    if not os.environ.get("KVBOOST_VLLM_PYTHON"):
        pytest.skip("needs vLLM: set KVBOOST_VLLM_PYTHON")
    running: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: str | None) -> subprocess.Popen[str]:
        command = [str(PYTHON), "-c", script, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _read(store: MemoryStore, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        store.put(block_of(chunk))


def test_vllms_decoder_reads_what_a_store_publishes(run: Any) -> None:

    chunks = prompt("a", "b")
    with closing(EventPublisher(ANY, replay_endpoint=ANY)) as publisher:
        store = MemoryStore(2 * SIZE)
        store.listen(StoreEvents(publisher.publish))
        _read(store, chunks)
        reader = run(_READER, publisher.endpoint, publisher.replay_endpoint)
        replayed = [json.loads(line) for line in iter(reader.stdout.readline, "ready\n")]
        assert [number for number, _, _ in replayed] == list(range(len(replayed)))
        assert {rank for _, rank, _ in replayed} == {0}
        events = [event for _, _, batch in replayed for event in batch]
        assert [name for name, _ in events] == ["AllBlocksCleared", "BlockStored", "BlockStored"]
        for chunk, (_, text) in zip(chunks, events[1:], strict=True):
            assert f"block_hashes=[{chunk.prefix_key!r}]" in text
            assert f"parent_block_hash={chunk.parent_key!r}" in text
            assert "block_size=4" in text
            assert "medium='CPU'" in text
            assert "locality='LOCAL', ownership='memory'" in text
        time.sleep(0.5)  # until its subscription has arrived
        store.clear()
        number, _, events = json.loads(reader.stdout.readline())
        assert number == len(replayed)
        assert [name for name, _ in events] == ["BlockRemoved", "BlockRemoved"]


def test_we_read_what_vllms_publisher_publishes(run: Any, unused_ports: list[int]) -> None:
    live, replay = (f"tcp://*:{port}" for port in unused_ports)
    batches: list[EventBatch] = []
    losses: list[str] = []

    def lost(reason: str) -> None:
        losses.append(reason)
        batches.clear()

    writer = run(_WRITER, live, replay)
    assert writer.stdout.readline() == "ready\n"
    endpoint, replay_endpoint = (f"tcp://127.0.0.1:{port}" for port in unused_ports)
    with EventSubscriber(endpoint, on_batch=batches.append, on_lost=lost, replay_endpoint=replay_endpoint):
        until(lambda: len(batches) == 2)  # from before we were there
        (stored,), (removed, cleared) = (batch.events for batch in batches)
        assert stored == BlockStored(
            [b"a" * 32, 7],
            None,
            [1, 2, 3, 4],
            2,
            None,
            "GPU",
            "x",
            extra_keys=[("salt",), None],
            group_idx=0,
            session_id="s",
        )
        assert (removed, cleared) == (BlockRemoved([b"a" * 32], "GPU"), AllBlocksCleared())
        writer.stdin.write("go\n")
        writer.stdin.flush()
        until(lambda: len(batches) == 3)
        assert losses == []
    with EventSubscriber(endpoint, on_batch=batches.append, on_lost=lost, replay_endpoint=replay_endpoint):
        until(lambda: len(batches) == 6)  # whoever joins now gets them again
        writer.stdin.write("go\n" * 4)
        writer.stdin.flush()
        until(lambda: len(batches) == 10)
        assert losses == []
    # It remembers four batches of seven.
    with EventSubscriber(endpoint, on_batch=batches.append, on_lost=lost, replay_endpoint=replay_endpoint):
        until(lambda: losses)
        until(lambda: len(batches) == 4)
        assert [batch.events for batch in batches] == [[BlockRemoved([number], None)] for number in range(1, 5)]


@pytest.fixture
def unused_ports() -> list[int]:

    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _page(event: BlockStored, page: Any) -> tuple[list[int], Any]:
    """The tokens and the parent of one of an event's pages."""
    at, size = event.block_hashes.index(page), event.block_size
    parent = event.block_hashes[at - 1] if at else event.parent_block_hash
    return event.token_ids[at * size : (at + 1) * size], parent


def test_a_vllm_server_with_our_connector_announces_our_tiers(
    model: Path, prompt: list[int], tmp_path: Path, unused_ports: list[int]
) -> None:
    """Stored, evicted, on disk: vLLM's own publisher says so, in vLLM's own names of pages."""
    live, replay = (f"tcp://127.0.0.1:{port}" for port in unused_ports)
    binds = [f"tcp://*:{port}" for port in unused_ports]
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": binds[0], "replay_endpoint": binds[1]}
    token_bytes = 2 * 30 * 3 * 64 * 4  # of SmolLM2 in float32
    # A quarter of the memory is for what waits to be written: a whole prompt must fit.
    settings = {"disk_cache_dir": str(tmp_path), "cache_bytes": 3000 * token_bytes, "chunk_size": 16}
    picture, losses = Picture(), list[str]()
    with (
        EventSubscriber(
            live, on_batch=lambda b: picture.apply(b.events), on_lost=losses.append, replay_endpoint=replay
        ),
        engine(model, connector=settings, kv_events_config=events) as vllm,
    ):
        size = vllm.block_size

        def told_until(condition: Callable[[], Any]) -> None:
            until(lambda: vllm.generate([7] * 40) and condition())  # what the worker reports travels with steps

        vllm.generate(prompt)
        told_until(lambda: len(picture.keys(None)) >= 640 // size)
        device = picture.held[None]
        for tier, medium in (("kvboost-memory", "CPU"), ("kvboost-disk", "STORAGE")):
            told_until(lambda tier=tier: len(picture.keys(tier)) >= 640 // size)
            told = picture.held[tier]
            assert {event.medium for event in told.values()} == {medium}
            assert set(told) <= set(device)
            assert all(_page(event, page) == _page(device[page], page) for page, event in told.items())
            assert {event.block_size for event in told.values()} == {size}
        others = [[token + shift for token in prompt] for shift in range(1, 6)]
        for each in others:
            vllm.generate(each)
        told_until(lambda: picture.keys("kvboost-disk") - picture.keys("kvboost-memory"))  # evicted, and still there
        vllm.forget()
        told_until(lambda: len(picture.keys(None)) <= 40 // size)  # but for what told_until asks
        assert losses == []
