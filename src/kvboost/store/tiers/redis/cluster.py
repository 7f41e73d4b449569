"""The values of a Redis Cluster, each on the node that has its slot.

Used by the Redis tier for ``redis+cluster://``. redis-py finds out which node has which slot; every node has links and
a breaker of its own. Invariants: a node that is gone costs its own values and no others'; the map of the slots is made
anew in the background, after any failure and until every node answers; no request waits for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvboost.store.tiers.breaker import Breaker
from kvboost.store.tiers.redis.connecting import Address, Nodes, Slots
from kvboost.store.tiers.redis.ledger import Ledger
from kvboost.store.tiers.redis.loading import PIECE_BYTES, Loading
from kvboost.store.tiers.redis.resp import Command, ProtocolError, Reply, ServerError
from kvboost.store.tiers.redis.server import Patience, Server, UnavailableError

_BEHIND_S = 1.0  # deadline of what no request waits for
_FIRST_MAP_S = 1.0  # who makes it waits so long for the first map of the slots, or as long as it has patience
_MAX_THREADS = 16  # nodes asked at once
_PAGE = b"1000"
_ALL_SLOTS = 16384


class Cluster:
    """Values on all nodes of a cluster. Thread-safe."""

    piece_bytes = PIECE_BYTES
    max_record_bytes: int | None = None

    def __init__(
        self,
        nodes: Nodes,
        *,
        patience: Patience,
        report: Callable[[UnavailableError], None],
    ) -> None:
        """``report`` is told of every failure; its ``cause`` is None if it was known before. Waits a little for the map
        of the slots: whoever asks before there is one finds nothing."""
        from redis.crc import key_slot

        self._key_slot = key_slot
        self._nodes, self._report = nodes, report
        self._patience = patience
        self._lock = threading.Lock()
        self._servers: dict[Address, Server] = {}
        self._slots: Slots | None = None
        self._was_asked = threading.Event()
        self._watch = Breaker(self._look, name="kvboost-redis-slots")
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="kvboost-redis-node")
        self._watch.failed()  # there is no map
        self._was_asked.wait(max(_FIRST_MAP_S, patience.timeout_s))

    @property
    def is_available(self) -> bool:
        """Whether every node answered when it was last used."""
        with self._lock:
            return self._slots is not None and not any(server.breaker.is_open for server in self._servers.values())

    def takes(self, name: bytes) -> bool:
        """Whether the node of this value is in use."""
        try:
            return not self._server_of(name).breaker.is_open
        except UnavailableError:
            return False

    def exist(self, names: Sequence[bytes]) -> list[bool | None]:
        """Which values are there, asked of all nodes at once; None for those of a node that did not answer."""
        replies = self._each(names, lambda name: (b"EXISTS", name))
        return [None if reply is None else reply == 1 for reply in replies]

    def load(self, keys: Sequence[bytes], *, ledger: Ledger, max_bytes: int) -> NodeRecords:
        """The records under these keys; every node sends its own at the same time."""
        found, missing = self._by_server([ledger.value(key) for key in keys])
        order: list[Loading | None] = [None] * len(keys)
        for server, places in found.items():
            own = [keys[at] for at in places]
            loading = Loading(own, server=server, ledger=ledger, max_bytes=max_bytes)
            for at in places:
                order[at] = loading
        return NodeRecords(order, without_node=UnavailableError(None) if missing else None)

    def put(self, names: Sequence[bytes], pieces: Sequence[tuple[memoryview, ...]], *, until_kept_ms: int) -> bool:
        """Write one record's pieces, which lie in one slot, in one round trip."""
        until = (b"PX", b"%d" % until_kept_ms)
        commands: list[Command] = [
            (b"SET", name, piece, *until) for name, piece in zip(names[1:], pieces[1:], strict=True)
        ]
        commands.append((b"SET", names[0], pieces[0], *until))  # now it is seen
        return self._together(names, commands) is not None

    def keep(self, names: Sequence[bytes], *, ttl_ms: int) -> bool:
        """Take the time limit of a record's pieces off, or set another."""
        commands = [(b"PEXPIRE", name, b"%d" % ttl_ms) if ttl_ms else (b"PERSIST", name) for name in names]
        return self._together(names, commands) == [1] * len(names)

    def _together(self, names: Sequence[bytes], commands: Sequence[Command]) -> list[Reply] | None:
        """The replies of the node that has all of these names; None if it has none."""
        try:
            server = self._server_of(names[0])
            with server.link(server.deadline(_BEHIND_S)) as link:
                return _checked(link.call(commands))
        except UnavailableError as error:
            self._report(error)
            return None

    def unlink(self, names: Sequence[bytes]) -> list[bytes]:
        """Remove values; those of a node that does not answer stay."""
        replies = self._each(names, lambda name: (b"UNLINK", name), seconds=_BEHIND_S)
        gone = [name for name, reply in zip(names, replies, strict=True) if reply is not None]
        if len(gone) < len(names):  # even if it is known that the node is gone: what was to be removed may come back
            left = len(names) - len(gone)
            self._report(UnavailableError(ConnectionError(f"{left} values are removed later: their node is gone")))
        return gone

    def scan(self, prefix: bytes) -> Iterator[list[bytes] | None]:
        """The names of all values, node by node; None for the rest of a node that does not answer."""
        slots = self._slots or {}
        if len(slots) < _ALL_SLOTS:
            yield None
        for address in sorted(set(slots.values())):
            cursor = b"0"
            while True:
                command = (b"SCAN", cursor, b"MATCH", prefix + b"{*", b"COUNT", _PAGE)
                try:
                    server = self._server_at(address)
                    with server.link(server.deadline(_BEHIND_S)) as link:
                        (reply,) = _checked(link.call([command]))
                except UnavailableError as error:
                    self._report(error)
                    yield None
                    break
                if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[0], bytes):
                    self._report(UnavailableError(ProtocolError("no page of a scan")))
                    yield None
                    break
                cursor, found = reply[0], reply[1]
                yield [name for name in found if isinstance(name, bytes)] if isinstance(found, list) else []
                if cursor == b"0":
                    break

    def forget(self, beginning: bytes) -> None:
        """Nothing: whatever is not counted is found by a scan."""

    def close(self) -> None:
        """Close every link."""
        self._watch.close()
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            servers, self._servers = self._servers, {}
        for server in servers.values():
            server.close()

    # Which node

    def _look(self) -> bool:
        """Make the map anew; whether every node on it is well."""
        try:
            slots = self._nodes.slots()
        except OSError as error:
            self._report(UnavailableError(error))
            self._was_asked.set()
            return False
        addresses = set(slots.values())
        with self._lock:
            self._slots = slots
            gone = [self._servers.pop(address) for address in set(self._servers) - addresses]
            well = bool(slots) and not any(server.breaker.is_open for server in self._servers.values())
        self._was_asked.set()
        for server in gone:
            server.close()
        return well

    def _server_of(self, name: bytes) -> Server:
        """The node of a value. Raises UnavailableError."""
        address = (self._slots or {}).get(self._key_slot(name))
        if address is None:
            self._watch.failed()
            raise UnavailableError(None)
        return self._server_at(address)

    def _server_at(self, address: Address) -> Server:
        with self._lock:
            server = self._servers.get(address)
            if server is None:
                server = Server(self._nodes.at(address), patience=self._patience, failed=self._watch.failed)
                self._servers[address] = server
            return server

    def _by_server(self, names: Sequence[bytes]) -> tuple[dict[Server, list[int]], list[int]]:
        """Where the values of each node stand among ``names``, and those of none."""
        found: dict[Server, list[int]] = {}
        missing: list[int] = []
        for at, name in enumerate(names):
            try:
                found.setdefault(self._server_of(name), []).append(at)
            except UnavailableError:
                missing.append(at)
        return found, missing

    def _each(
        self, names: Sequence[bytes], command: Callable[[bytes], Command], *, seconds: float | None = None
    ) -> list[Reply]:
        """The replies for all names, each from its node, all nodes at once; None where there was none."""
        replies: list[Reply] = [None] * len(names)
        found, _ = self._by_server(names)

        def ask(server: Server, places: list[int]) -> list[Reply] | UnavailableError:
            try:
                with server.link(server.deadline(seconds)) as link:
                    return _checked(link.call([command(names[at]) for at in places]))
            except UnavailableError as error:
                return error

        asked = [(places, partial(ask, server, places)) for server, places in found.items()]
        others = [self._pool.submit(work) for _, work in asked[1:]]
        answers = [work() for _, work in asked[:1]] + [other.result() for other in others]
        for (places, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, UnavailableError):
                self._report(answer)
                continue
            for at, reply in zip(places, answer, strict=True):
                replies[at] = reply
        return replies


def _checked(replies: list[Reply]) -> list[Reply]:
    for reply in replies:
        if isinstance(reply, ServerError):
            raise reply
    return replies


class NodeRecords:
    """The records of several nodes, in the order asked for."""

    def __init__(self, order: Sequence[Loading | None], *, without_node: UnavailableError | None) -> None:
        self._order = iter(order)
        self._all = {id(loading): loading for loading in order if loading is not None}.values()
        self._without_node = without_node
        self.unavailable: UnavailableError | None = None

    def __iter__(self) -> NodeRecords:
        return self

    def __next__(self) -> memoryview | None:
        loading = next(self._order)
        record = None if loading is None else next(loading)
        self.unavailable = self._without_node if loading is None else loading.unavailable
        return record

    def close(self) -> None:
        """Give up what has not come yet."""
        for loading in self._all:
            loading.close()
