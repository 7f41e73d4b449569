"""Publisher and subscriber over real sockets: everything arrives once and in order, or the loss is told."""

from __future__ import annotations

import logging
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="needs kvboost[fleet]")
pytest.importorskip("zmq", reason="needs kvboost[fleet]")

import zmq

from examples.fleet.subscriber import EventSubscriber
from kvboost.errors import ConfigError
from kvboost.fleet.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent, encode_batch
from kvboost.fleet.publish import EventPublisher, binds

ANY = "tcp://127.0.0.1:0"
_SECONDS = 30.0


def until(condition: Callable[[], Any], what: str = "it") -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.005)


def removed(number: int) -> BlockRemoved:
    return BlockRemoved([number], "CPU")


class Heard:
    """What a subscriber was told, since the last loss."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []
        self.losses: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def batch(self, batch: EventBatch) -> None:
        self.may_go_on.wait()
        self.events.extend(batch.events)

    def lost(self, reason: str) -> None:
        self.losses.append(reason)
        self.events.clear()

    @property
    def numbers(self) -> list[Any]:
        return [event.block_hashes[0] for event in self.events if isinstance(event, BlockRemoved)]


def subscribed(publisher: EventPublisher, heard: Heard, **options: Any) -> EventSubscriber:
    options = {"replay_endpoint": publisher.replay_endpoint, **options}
    return EventSubscriber(publisher.endpoint, on_batch=heard.batch, on_lost=heard.lost, **options)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    with closing(EventPublisher(ANY, replay_endpoint=ANY)) as made:
        yield made


def test_events_arrive_in_order_from_the_first_on(publisher: EventPublisher, heard: Heard) -> None:
    stored = BlockStored([b"key"], None, [1, 2, 3], 3, None, "CPU", None, content_hashes=[b"content"])
    publisher.publish([AllBlocksCleared(), stored])  # before anybody listens
    with subscribed(publisher, heard):
        until(lambda: len(heard.events) == 2)
        for number in range(3000):
            publisher.publish([removed(number)])
        until(lambda: len(heard.events) == 3002)
    assert heard.events[:2] == [AllBlocksCleared(), stored]
    assert heard.numbers == list(range(3000))
    assert heard.losses == []


def test_events_of_one_moment_share_messages(publisher: EventPublisher, heard: Heard) -> None:
    batches: list[EventBatch] = []
    with EventSubscriber(
        publisher.endpoint,
        on_batch=batches.append,
        on_lost=heard.lost,
        replay_endpoint=publisher.replay_endpoint,
    ):
        for number in range(1000):
            publisher.publish([removed(number)])
        until(lambda: sum(len(batch.events) for batch in batches) == 1000)
    assert len(batches) < 100
    assert max(len(batch.events) for batch in batches) <= 256
    assert all(abs(batch.ts - time.time()) < 60 and batch.data_parallel_rank == 0 for batch in batches)


class Wire:
    """A publisher played by the test: it sends the numbers it likes, and remembers what it likes."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.live = self.context.socket(zmq.XPUB)
        self.replay = self.context.socket(zmq.ROUTER)
        self.live.bind(ANY)
        self.replay.bind(ANY)
        self.endpoint = self.live.last_endpoint.decode()
        self.replay_endpoint = self.replay.last_endpoint.decode()
        self.remembered: dict[int, bytes] = {}
        self.asked: list[int] = []

    def wait_for_subscriber(self) -> None:
        assert self.live.poll(1000 * _SECONDS)
        self.live.recv()

    def send(self, number: int, *, live: bool = True, remember: bool = True) -> None:
        payload = encode_batch(EventBatch(time.time(), [removed(number)]))
        if remember:
            self.remembered[number] = payload
        if live:
            self.live.send_multipart((b"", struct.pack(">Q", number), payload))

    def answer(self, *, frames: int = 3) -> None:
        assert self.replay.poll(1000 * _SECONDS), "nobody asked"
        client, _, first = self.replay.recv_multipart()
        self.asked.append(struct.unpack(">Q", first)[0])
        for number, payload in self.remembered.items():
            if number >= self.asked[-1]:
                message = (b"", struct.pack(">Q", number), payload)[-frames:]
                self.replay.send_multipart((client, b"", *message))
        end = (b"", struct.pack(">q", -1), b"")[-frames:]
        self.replay.send_multipart((client, b"", *end))

    def interrupt(self) -> None:
        """Break the connection, and listen again at the same place."""
        self.live.close(linger=0)

        def bound() -> bool:
            self.live = self.context.socket(zmq.XPUB)
            try:
                self.live.bind(self.endpoint)
            except zmq.ZMQError:
                self.live.close(linger=0)
            return not self.live.closed

        until(bound)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


def joined(wire: Any, heard: Heard, **options: Any) -> EventSubscriber:
    """A subscriber that has asked for the beginning and got it."""
    subscriber = subscribed(wire, heard, quiet_s=60.0, **options)
    wire.wait_for_subscriber()
    wire.answer()
    return subscriber


@pytest.mark.parametrize("frames", [3, 2], ids=["vLLM now", "vLLM before it had topics"])
def test_a_gap_is_filled_by_a_replay(wire: Wire, heard: Heard, frames: int) -> None:
    with joined(wire, heard):
        wire.send(0)
        until(lambda: heard.numbers == [0])
        wire.send(1, live=False)
        wire.send(2, live=False)
        wire.send(3)
        wire.send(4)
        wire.answer(frames=frames)
        until(lambda: heard.numbers == [0, 1, 2, 3, 4])
        wire.send(5)
        until(lambda: heard.numbers == [0, 1, 2, 3, 4, 5])
    assert heard.losses == []
    assert wire.asked == [0, 0]


def test_what_is_not_remembered_is_lost_and_said_so(wire: Wire, heard: Heard) -> None:
    with joined(wire, heard):
        wire.send(0)
        until(lambda: heard.numbers == [0])
        wire.remembered.clear()
        wire.send(1, live=False, remember=False)
        wire.send(2)
        wire.answer()  # from 0, to see whether it is the same publisher
        wire.answer()  # all there is
        until(lambda: heard.numbers == [2])
    assert len(heard.losses) == 1


def test_a_hole_in_what_is_remembered_is_a_loss(wire: Wire, heard: Heard) -> None:
    """The publisher had to drop events, and left a number out."""
    with joined(wire, heard):
        wire.send(0)
        wire.send(2)
        wire.send(3)
        wire.answer()
        until(lambda: heard.numbers == [2, 3])
        assert len(heard.losses) == 1
        wire.send(4)
        until(lambda: heard.numbers == [2, 3, 4])


def test_a_replay_that_lost_a_part_on_its_way_is_asked_for_again(wire: Wire, heard: Heard) -> None:
    with joined(wire, heard):
        wire.send(0)
        for number in range(1, 9):
            wire.send(number, live=False)
        whole = dict(wire.remembered)
        del wire.remembered[5]
        wire.send(9)
        wire.answer()
        wire.remembered = whole | {9: wire.remembered[9]}
        wire.answer()
        until(lambda: heard.numbers == list(range(10)))
    assert heard.losses == []


def test_the_last_batch_before_a_silence_is_asked_for(wire: Wire, heard: Heard) -> None:
    with subscribed(wire, heard, quiet_s=0.1):
        wire.wait_for_subscriber()
        wire.answer()
        wire.send(0)
        wire.send(1, live=False)
        until(lambda: heard.numbers == [0])
        wire.answer()
        until(lambda: heard.numbers == [0, 1])
        wire.send(2)
        until(lambda: heard.numbers == [0, 1, 2])  # though nobody may have answered a question yet
        wire.answer()
        assert not wire.replay.poll(300), "asked again though nothing came"
    assert heard.losses == []


def test_without_a_replay_every_gap_is_a_loss(wire: Wire, heard: Heard) -> None:
    with subscribed(wire, heard, replay_endpoint=None):
        wire.wait_for_subscriber()
        wire.send(0)
        wire.send(1)
        until(lambda: heard.numbers == [0, 1])
        assert heard.losses == []
        wire.send(3)
        until(lambda: heard.numbers == [3])
        assert len(heard.losses) == 1


def test_a_publisher_that_does_not_answer_is_a_loss(wire: Wire, heard: Heard) -> None:
    with subscribed(wire, heard, patience_s=0.2):
        wire.wait_for_subscriber()
        wire.send(7)
        until(lambda: heard.numbers == [7])
        assert len(heard.losses) == 1


def test_another_format_is_a_loss_and_the_thread_goes_on(wire: Wire, heard: Heard) -> None:
    with joined(wire, heard):
        wire.send(0)
        wire.live.send_multipart((b"", struct.pack(">Q", 1), b"not msgpack"))
        wire.send(2)
        until(lambda: heard.numbers == [2])
        wire.live.send(b"one frame")
        wire.send(3)
        until(lambda: heard.numbers == [3])
    assert len(heard.losses) == 2


def test_a_callback_that_fails_is_logged_and_the_thread_goes_on(
    wire: Wire, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    def batch(batch: EventBatch) -> None:
        if batch.events == [removed(0)]:
            raise RuntimeError("a bug")
        heard.batch(batch)

    with EventSubscriber(wire.endpoint, on_batch=batch, on_lost=heard.lost, replay_endpoint=wire.replay_endpoint):
        wire.wait_for_subscriber()
        wire.answer()
        wire.send(0)
        wire.send(1)
        until(lambda: heard.numbers == [1])
    assert len(heard.losses) == 1
    assert "a bug" in caplog.text


@pytest.mark.parametrize("sent_before", [0, 2, 3, 9])
def test_a_publisher_that_was_started_anew_is_noticed(heard: Heard, sent_before: int) -> None:
    """However many it has sent before the subscriber is back: also if the next number is the one it waits for."""
    with closing(EventPublisher(ANY, replay_endpoint=ANY)) as first:
        places = {"endpoint": first.endpoint, "replay_endpoint": first.replay_endpoint}
        subscriber = subscribed(first, heard)
        for number in range(3):
            first.publish([removed(number)])
            until(lambda number=number: heard.numbers[-1:] == [number])  # type: ignore[misc]
    second = _opened_again(places)
    for number in range(sent_before):
        second.publish([removed(100 + number)])
        time.sleep(0.03)  # a batch each
    until(lambda: heard.losses, "the loss")
    second.publish([removed(200)])
    until(lambda: heard.numbers == [*range(100, 100 + sent_before), 200])
    subscriber.close()
    second.close()


def _opened_again(places: dict[str, Any]) -> EventPublisher:
    made: list[EventPublisher] = []

    def opened() -> bool:
        try:
            made.append(EventPublisher(**places))
        except ConfigError:
            return False  # the system has not let go of the port yet
        return True

    until(opened)
    return made[0]


def test_a_short_interruption_loses_nothing(wire: Wire, heard: Heard) -> None:
    """The connection breaks and the publisher lives on: what was missed is replayed."""
    with joined(wire, heard):
        wire.send(0)
        until(lambda: heard.numbers == [0])
        wire.interrupt()
        wire.send(1)  # to nobody
        wire.wait_for_subscriber()
        wire.answer()
        until(lambda: heard.numbers == [0, 1])
        wire.send(2)
        until(lambda: heard.numbers == [0, 1, 2])
    assert heard.losses == []


def test_without_a_replay_an_interruption_is_a_loss(wire: Wire, heard: Heard) -> None:
    with subscribed(wire, heard, replay_endpoint=None):
        wire.wait_for_subscriber()
        wire.send(0)
        until(lambda: heard.numbers == [0])
        wire.interrupt()
        wire.wait_for_subscriber()
        until(lambda: heard.losses)
        wire.send(1)  # the right number, and maybe another publisher
        until(lambda: heard.numbers == [1])
    assert len(heard.losses) == 1


def test_a_late_subscriber_is_told_that_it_missed_the_beginning(heard: Heard) -> None:
    with closing(EventPublisher(ANY, replay_endpoint=ANY, replay_batches=3)) as publisher:
        for number in range(6):
            publisher.publish([removed(number)])
            time.sleep(0.03)  # a batch each
        with subscribed(publisher, heard):
            until(lambda: heard.numbers[-1:] == [5])
    assert heard.numbers == [3, 4, 5]
    assert len(heard.losses) == 1


def test_what_is_remembered_is_bounded_by_bytes(heard: Heard) -> None:
    large = BlockStored([b"k"], None, [2**31] * 10_000, 10_000, None, None, None)
    with closing(EventPublisher(ANY, replay_endpoint=ANY, replay_bytes=130_000)) as publisher:
        for _ in range(5):
            publisher.publish([large])
            time.sleep(0.03)
        with subscribed(publisher, heard):
            until(lambda: heard.losses)
            until(lambda: heard.events == [large, large])


def test_publishing_never_waits_for_a_slow_subscriber(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    """Its callback stands still, and 64 MB are published: no call takes long, and in the end it has all or knows."""
    large = BlockStored([b"k"], None, [2**31] * 200, 200, None, None, None)
    heard.may_go_on.clear()
    with closing(EventPublisher(ANY, replay_endpoint=ANY, max_waiting=2000)) as publisher, subscribed(publisher, heard):
        longest = 0.0
        cpu = time.thread_time()
        for _ in range(64_000):
            began = time.perf_counter()
            publisher.publish([large])
            longest = max(longest, time.perf_counter() - began)
        assert time.thread_time() - cpu < 5.0
        assert longest < 2.0  # another process may have had the core
        publisher.publish([removed(1)])
        heard.may_go_on.set()
        until(lambda: heard.numbers == [1])
        assert (publisher._dropped > 0) == ("KV events were dropped" in caplog.text)
        assert len(heard.events) == 64_001 or heard.losses


def test_dropped_events_leave_a_gap(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    with closing(EventPublisher(ANY, replay_endpoint=ANY, max_waiting=10)) as publisher, subscribed(publisher, heard):
        publisher.publish([removed(-1)])
        until(lambda: heard.numbers == [-1])
        publisher.publish([removed(number) for number in range(25)])
        until(lambda: heard.numbers == list(range(15, 25)))
        assert len(heard.losses) == 1
        assert publisher._dropped == 15
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.getMessage().startswith("15 KV events were dropped")


def test_closing_sends_what_waits(heard: Heard) -> None:
    publisher = EventPublisher(ANY, replay_endpoint=ANY)
    with subscribed(publisher, heard):
        publisher.publish([removed(0)])
        until(lambda: heard.numbers == [0])
        for number in range(1, 2000):
            publisher.publish([removed(number)])
        publisher.close()
        publisher.close()
        publisher.publish([removed(2000)])  # nobody minds
        until(lambda: heard.numbers == list(range(2000)))


def test_random_traffic_with_random_losses(heard: Heard) -> None:
    """Whatever is missed, each loss is told, and behind it everything is in order without a gap."""
    source = random.Random(5)
    wire = Wire()
    stop = threading.Event()

    def serve() -> None:  # sockets are used by one thread
        wire.wait_for_subscriber()
        for number in range(400):
            wire.send(number, live=source.random() < 0.7, remember=source.random() < 0.97)
            while len(wire.remembered) > 20:
                del wire.remembered[next(iter(wire.remembered))]
            if wire.replay.poll(1):
                wire.answer()
        wire.send(400)
        while not stop.is_set():
            if wire.replay.poll(10):
                wire.answer()

    thread = threading.Thread(target=serve)
    thread.start()
    with subscribed(wire, heard):  # type: ignore[arg-type]
        until(lambda: heard.numbers[-1:] == [400])
    stop.set()
    thread.join()
    wire.close()
    first = heard.numbers[0]
    assert heard.numbers == list(range(first, 401))
    assert heard.losses


def test_replays_that_make_no_sense_are_ignored(publisher: EventPublisher, heard: Heard) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(publisher.replay_endpoint)
        for frames in ([b""], [b"", b"short"], [b"a", b"b", b"c", b"d"], [b"", b""]):
            client.send_multipart(frames)
        with subscribed(publisher, heard):
            publisher.publish([removed(0)])
            until(lambda: heard.numbers == [0])


def test_a_topic_reaches_only_its_subscribers(heard: Heard) -> None:
    with (
        closing(EventPublisher(ANY, replay_endpoint=ANY, topic="kv@one@model")) as publisher,
        subscribed(publisher, heard, topic="kv@"),
        subscribed(publisher, other := Heard(), topic="else", replay_endpoint=None),
    ):
        for number in range(20):
            publisher.publish([removed(number)])
            until(lambda number=number: heard.numbers[-1:] == [number])  # type: ignore[misc]
    assert other.numbers == []


def test_an_address_in_use_is_refused(publisher: EventPublisher) -> None:
    with pytest.raises(ConfigError, match="KV events cannot be published on"):
        EventPublisher(publisher.endpoint)
    with pytest.raises(ConfigError, match="KV events cannot be published on nonsense"):
        EventPublisher("nonsense")


@pytest.mark.parametrize(
    ("endpoint", "listens"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://127.0.0.1:5557", True),
        ("tcp://localhost:5557", True),
        ("ipc:///run/events", True),
        ("tcp://router.example:5557", False),
        ("tcp://10.0.0.7:5557", False),
    ],
)
def test_which_endpoints_are_listened_on(endpoint: str, listens: bool) -> None:
    assert binds(endpoint) is listens
