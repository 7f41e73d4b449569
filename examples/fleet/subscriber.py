"""Receives KV events of one publisher, ours or vLLM's, and knows whether any is missing.

To be copied by whoever keeps a picture of what a server holds, as a router does (``docs/fleet.md``). Invariants:
batches are handed over in the order of their numbers, each once; where one is missing for good, ``on_lost`` is called
before the next is handed over, and the picture must be dropped. A publisher that was started anew counts from 0 again
and does not say so: after every connection the last batch is asked for again, and if it is another one now, everything
is lost.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Self

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvboost.fleet.events import EventBatch, decode_batch
from kvboost.fleet.publish import END

_log = logging.getLogger(__name__)

_MAX_HELD = 10_000  # batches that wait for a replay; ZeroMQ keeps as many before that
_END = int.from_bytes(END, "big")


class _Replay:
    """One request for batches. A new socket each, so that a late answer to an old one is not taken for another."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        first: int,
        known: bytes | None,
        is_check: bool,
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvhwm = 0, 0
        self.socket.connect(endpoint)
        self.socket.send_multipart((b"", first.to_bytes(8, "big")))
        self.began = time.monotonic()
        """Or when the last batch came."""
        self.first, self.known = first, known
        """What the first batch must be, until it has come; None if it is not known."""
        self.is_check = is_check
        """Nothing is known to be missing."""
        self.delivered = 0


class EventSubscriber:
    """Calls back from a thread of its own, until closed."""

    def __init__(
        self,
        endpoint: str,
        *,
        on_batch: Callable[[EventBatch], None],
        on_lost: Callable[[str], None],
        replay_endpoint: str | None = None,
        topic: str = "",
        patience_s: float = 5.0,
        quiet_s: float = 1.0,
    ) -> None:
        """Connect to a publisher at ``tcp://host:port``. Without ``replay_endpoint`` every gap is a loss.

        ``on_lost`` gets the reason. It is also called at the beginning if the first batches are gone. A replay that
        stands still for ``patience_s`` is given up. After ``quiet_s`` without a batch the publisher is asked for more.
        """
        self._on_batch, self._on_lost = on_batch, on_lost
        self._replay_endpoint, self._patience_s, self._quiet_s = replay_endpoint, patience_s, quiet_s
        self._check_at: float | None = None
        self._next: int | None = 0
        """The number of the next batch; None: whatever comes."""
        self._last: bytes | None = None
        """The batch before it."""
        self._is_lost = False
        """Nothing was handed over since the last loss."""
        self._replay: _Replay | None = None
        self._held: deque[tuple[int, bytes]] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._live.rcvhwm, self._live.linger = _MAX_HELD, 0
        self._live.subscribe(topic)
        self._monitor = self._live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._live.connect(endpoint)
        self._ending = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kvboost-event-subscriber", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Return once nothing is called back any more. Harmless the second time."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._wake_writer.send(b"\0")
        self._thread.join()
        self._wake_reader.close()
        self._wake_writer.close()
        self._live.disable_monitor()
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # The thread

    def _run(self) -> None:
        while not self._ending.is_set():
            poller = zmq.Poller()
            poller.register(self._wake_reader, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
            poller.register(self._live, zmq.POLLIN)
            until = self._check_at
            if self._replay is not None:
                poller.register(self._replay.socket, zmq.POLLIN)
                until = self._replay.began + self._patience_s
            ready = dict(poller.poll(max(0, round(1000 * (until - time.monotonic()))) if until is not None else None))
            try:
                if self._monitor in ready:  # first: a new connection may be to a new publisher
                    self._connection_changed()
                elif self._replay is not None and self._replay.socket in ready:
                    *_, number, payload = self._replay.socket.recv_multipart()
                    self._replayed(self._replay, int.from_bytes(number, "big"), payload)
                elif self._live in ready:
                    _, number, payload = self._live.recv_multipart()
                    self._came(int.from_bytes(number, "big"), payload)
                elif not ready and self._replay is not None:
                    self._give_up(self._replay)
                elif not ready:
                    self._check_at = None
                    self._fill("", is_check=True)
            except ValueError as error:
                self._lose(f"a message has other parts than KV events have ({error})")

    def _connection_changed(self) -> None:
        connected = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._end_replay()
        if connected:
            self._held.clear()  # of the connection before; a replay has them
            self._fill("the connection was interrupted")

    def _came(self, number: int, payload: bytes) -> None:
        """A batch was published."""
        if self._replay is not None and not self._replay.is_check:
            if len(self._held) < _MAX_HELD:  # else there is a gap, and another replay
                self._held.append((number, payload))
        elif self._next is None or number == self._next:
            self._deliver(number, payload)
        elif number > self._next:
            self._held.append((number, payload))
            self._fill(f"{number - self._next} batches were missed")

    def _fill(self, reason: str, *, is_check: bool = False) -> None:
        """Ask for what is missing, the last batch included; if nobody can be asked, it is lost."""
        self._end_replay()
        if self._replay_endpoint is not None:
            first = self._next - 1 if self._next else 0
            self._replay = _Replay(
                self._context, self._replay_endpoint, first=first, known=self._last, is_check=is_check
            )
        elif self._last is not None or self._held:
            self._lose(f"{reason}, and there is nobody to ask for them")
            self._take_held()

    def _replayed(self, replay: _Replay, number: int, payload: bytes) -> None:
        """A batch was sent again, or all were."""
        replay.began = time.monotonic()
        if replay.known is not None:
            if (number, payload) != (replay.first, replay.known):
                self._lose("the publisher has started anew, or remembers too little")
                self._next = 0  # all that it remembers
                return self._fill("")
            replay.known = None
        elif number == _END:
            self._end_replay()
            self._take_held(stuck=not replay.delivered)
            if not replay.is_check:
                self._came_to_rest()
        elif self._next is None or number == self._next:
            self._deliver(number, payload)
            replay.delivered += 1
        elif number > self._next:
            if replay.delivered:  # a full pipe may have lost it on its way
                return self._fill("")
            self._lose(f"{number - self._next} batches are not remembered any more")
            self._deliver(number, payload)
            replay.delivered += 1
        return None

    def _take_held(self, *, stuck: bool = True) -> None:
        """Hand over what came during a replay. If there is a gap, ask again, unless the replay was ``stuck`` there."""
        while self._held:
            number, payload = self._held[0]
            if self._next is not None and number > self._next:
                if not stuck:
                    return self._fill("")
                self._lose(f"{number - self._next} batches are not remembered any more")
            self._held.popleft()
            if self._next is None or number >= self._next:
                self._deliver(number, payload)
        return None

    def _give_up(self, replay: _Replay) -> None:
        self._end_replay()
        if replay.delivered:
            self._fill("")  # its end may have been lost on its way
        elif not replay.is_check:
            self._lose("the publisher does not answer")
            self._take_held()

    def _came_to_rest(self) -> None:
        """If nothing more comes, ask in a while."""
        if self._replay_endpoint is not None:
            self._check_at = time.monotonic() + self._quiet_s

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.socket.close()
            self._replay = None

    def _deliver(self, number: int, payload: bytes) -> None:
        self._next, self._last = number + 1, payload
        self._came_to_rest()
        try:
            batch = decode_batch(payload)
        except msgspec.DecodeError as error:
            self._lose(f"a batch is in another format: {error}")
            return
        self._is_lost = False
        try:
            self._on_batch(batch)
        except Exception:  # noqa: BLE001 - the thread must go on
            _log.exception("KV events could not be used; the picture is dropped")
            self._lose("the events before could not be used")

    def _lose(self, reason: str) -> None:
        """What was handed over so far is of no use; go on with whatever comes next."""
        self._next = self._last = None
        if self._is_lost:
            return
        self._is_lost = True
        try:
            self._on_lost(reason)
        except Exception:  # noqa: BLE001 - the thread must go on
            _log.exception("the loss of KV events (%s) could not be reported", reason)
