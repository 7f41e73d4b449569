"""Publishes KV events over ZeroMQ, framed as vLLM does it, with a replay of what was sent lately.

Made by ``kvboost serve --kv-events``. A message is ``(topic, sequence number, payload)``; the last of a replay has the
number -1. Invariants: :meth:`EventPublisher.publish` never waits; what waits and what is remembered is bounded; where
events are dropped a number is left out, so that every subscriber notices. As in vLLM nothing is authenticated or
encrypted, and events carry the token ids of all prompts.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from kvboost.errors import ConfigError
from kvboost.fleet.events import EventBatch, KVEvent, encode_batch

_log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
"""The number behind the last batch of a replay."""
_MAX_BATCH = 256  # events in one message
_GATHER_S = 0.01  # a prompt is stored chunk by chunk: wait for the next ones
_LINGER_MS = 1000  # for what is not sent yet when the publisher is closed
_UNSENT = 1000  # batches that ZeroMQ keeps for one slow subscriber before it leaves some out


class EventPublisher:
    """Sends events from a thread of its own. Thread-safe."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        replay_batches: int = 10_000,
        replay_bytes: int = 64 * 2**20,
        max_waiting: int = 100_000,
    ) -> None:
        """``endpoint`` as ``tcp://*:5557``: see :func:`binds`. ``replay_endpoint`` is always bound.

        At most ``max_waiting`` events wait to be sent; then the oldest are dropped. Raises ConfigError for an endpoint
        that cannot be used.
        """
        self._topic = topic.encode()
        self._remembered: deque[tuple[bytes, bytes]] = deque()
        self._remembered_bytes = 0
        self._max_remembered = replay_batches, replay_bytes
        self._lock = threading.Lock()
        self._waiting: deque[KVEvent] = deque()
        self._max_waiting = max_waiting
        self._dropped = self._reported_drops = 0
        self._number = 0
        self._woken = self._closed = False
        self._ending = threading.Event()
        self._context = zmq.Context()
        try:
            self._live = self._open(zmq.PUB, endpoint, bind=binds(endpoint), unsent=_UNSENT)
            self._replay = (
                self._open(zmq.ROUTER, replay_endpoint, bind=True, unsent=replay_batches + 1)
                if replay_endpoint is not None
                else None
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _address(self._live)
        """Where events are published, with the port that was chosen for port 0."""
        self.replay_endpoint = _address(self._replay) if self._replay is not None else None
        """Where they are asked for again."""
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvboost-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, endpoint: str, *, bind: bool, unsent: int) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.sndhwm, opened.linger = unsent, _LINGER_MS
        try:
            (opened.bind if bind else opened.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"KV events cannot be published on {endpoint} ({error}); give a free address such as tcp://*:5557"
            ) from error
        return opened

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Send these events soon, in this order. Returns at once; does nothing once the publisher is closed."""
        with self._lock:
            if self._closed:
                return
            self._waiting.extend(events)
            while len(self._waiting) > self._max_waiting:
                self._waiting.popleft()
                self._dropped += 1
            self._wake()

    def close(self) -> None:
        """Send what waits, for a second at most, and close the sockets. Harmless the second time."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ending.set()
            self._wake()
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()
        self._context.destroy(linger=_LINGER_MS)

    def _wake(self) -> None:
        if not self._woken:  # the lock is held; one byte is enough
            self._woken = True
            self._wake_writer.send(b"\0")

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._ending.is_set():
            ready = dict(poller.poll())
            if self._replay in ready:
                self._answer()
            if self._wake_reader.fileno() in ready:
                self._ending.wait(_GATHER_S)
                self._wake_reader.recv(1)
                self._send_waiting()
        self._send_waiting()

    def _send_waiting(self) -> None:
        with self._lock:
            self._woken = False
        while True:
            with self._lock:
                events = [self._waiting.popleft() for _ in range(min(_MAX_BATCH, len(self._waiting)))]
                dropped = self._dropped
            if not events:
                return
            if dropped > self._reported_drops:
                self._number += 1  # nobody gets this number
                _log.warning(
                    "%d KV events were dropped, too many waited to be sent; subscribers must start anew",
                    dropped - self._reported_drops,
                )
                self._reported_drops = dropped
            self._send(events)

    def _send(self, events: list[Any]) -> None:
        number = self._number.to_bytes(8, "big")
        self._number += 1  # first: if anything fails, nobody gets this number
        try:
            payload = encode_batch(EventBatch(time.time(), events, data_parallel_rank=0))
            self._live.send_multipart((self._topic, number, payload))
        except (zmq.ZMQError, msgspec.MsgspecError, TypeError):
            _log.exception("%d KV events could not be sent; subscribers must start anew", len(events))
            return
        self._remembered.append((number, payload))
        self._remembered_bytes += len(payload)
        batches, nbytes = self._max_remembered
        while len(self._remembered) > batches or self._remembered_bytes > nbytes:
            self._remembered_bytes -= len(self._remembered.popleft()[1])

    def _answer(self) -> None:
        """Send the batches that a subscriber asks for."""
        assert self._replay is not None
        client, *request = self._replay.recv_multipart()
        if len(request) != 2 or len(request[1]) != len(END):
            _log.debug("a request for KV events was not understood: %r", request)
            return
        for number, payload in self._remembered:
            if number >= request[1]:  # big-endian numbers of one length: their order is that of the bytes
                self._replay.send_multipart((client, b"", self._topic, number, payload))
        self._replay.send_multipart((client, b"", b"", END, b""))


def _address(of: zmq.Socket[bytes]) -> str:
    return of.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def binds(endpoint: str) -> bool:
    """Whether an endpoint is listened on: one of this machine by its form. Others are connected to, as in vLLM.

    vLLM connects to loopback addresses, too.
    """
    scheme, _, address = endpoint.partition("://")
    host = address.rpartition(":")[0].strip("[]")
    return scheme in ("ipc", "inproc") or host in ("*", "::", "0.0.0.0", "localhost", "::1") or host.startswith("127.")
