"""A fleet in simulated time: the real router, stores and eviction; prefill as seconds per token.

Used by :mod:`benchmarks.fleet.fleet_simulation`. A replica prefills one request after the other, in the order they were
sent to it; answers are decoded beside that. Its store is a real :class:`kvboost.store.MemoryStore`, which evicts as it
always does, with blocks that have a size and no data. Invariant: the router knows what replicas have said until now,
not what they hold.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.fleet_load import Request
from benchmarks.common.key_summary import KeySummary, SimulatedIndex, keys_of
from kvboost.extend import EvictionPolicy
from kvboost.fleet.route import RouteCosts
from kvboost.store import MemoryStore
from kvboost.store.eviction import LeastExpected
from kvboost.types import Chunk, KVBlock, PutOutcome

SHARED = "shared tier"


@dataclass(frozen=True)
class Fleet:
    """What is simulated."""

    replicas: int
    capacity: int
    """Of one replica's memory, in tokens."""
    costs: RouteCosts
    chained: bool
    """Text is reused as a prefix only; else wherever it stands."""
    pooled: bool = False
    """One memory for all, as near to each as its own: the bound."""
    event_delay: float = 0.05
    """Seconds from the end of a prefill until the router knows what was stored."""
    slow: tuple[float, float, float] | None = None
    """From, to (seconds), and how many times as long the shared tier takes then."""
    balance: float | None = None
    """Instead of queues: only replicas with at most this much more than the mean of all tokens so far are chosen."""
    policy: Callable[[], EvictionPolicy] = LeastExpected
    requests_per_copy: float | None = None
    """Keep what others are known to hold only if it was asked for so often for each of them; None keeps it always."""


@dataclass
class Outcome:
    """What came of it."""

    ttft: list[float]
    tokens: float = 0.0
    local: float = 0.0
    shared: float = 0.0
    router_seconds: list[float] = field(default_factory=list)
    retried: int = 0
    index_bytes: int = 0
    index_keys: int = 0
    loads: list[float] = field(default_factory=list)
    """Tokens sent to each replica."""


@dataclass(frozen=True)
class Outage:
    """A replica goes at ``at`` and is back, empty, ``seconds`` later; if ``drained``, after its queue."""

    at: float
    replica: int
    seconds: float
    drained: bool


class Replica:
    """One server with its memory."""

    def __init__(self, number: int, store: MemoryStore, *, chained: bool) -> None:
        self.number, self.name = number, f"replica-{number}"
        self.store, self._chained = store, chained
        self.summary = KeySummary()
        self.up = True
        self.life = 0  # how often it was started again
        self.unfinished: deque[tuple[float, Request]] = deque()
        self.sent_tokens = 0.0
        self._evicted: list[bytes] = []
        store.on_evict = self._dropped

    def _dropped(self, block: KVBlock) -> None:
        self._evicted.append(block.key)

    def look_up(self, request: Request) -> tuple[list[bool], int, Callable[[], None]]:
        """Which chunks are here, how many of the first as they stand, and what ends the lookup."""
        chunks = request.chunks
        if self._chained:
            lease = self.store.lease(chunks)
            count = len(lease.blocks)
            return [number < count for number in range(len(chunks))], count, lease.release
        found = self.store.lease_content(chunks, after=0)
        blocks = found.blocks
        pairs = enumerate(zip(blocks, chunks, strict=True))
        exact = next((n for n, (b, c) in pairs if b is None or b.key != c.prefix_key), len(chunks))
        self._keys = [block.key if block is not None else None for block in blocks]
        return [block is not None for block in blocks], exact, found.release

    def keep(self, chunks: Sequence[Chunk], here: Sequence[bool], admit: Sequence[bool]) -> None:
        """Store what was not here, and tell the policy and the summary."""
        stored: list[Chunk] = []
        chain: list[bytes] = []
        for number, chunk in enumerate(chunks):
            if here[number]:
                chain.append(chunk.prefix_key if self._chained else self._keys[number] or b"")
                continue
            outcome = self.store.put(_block(chunk, chained=self._chained)) if admit[number] else PutOutcome.REFUSED
            if outcome is PutOutcome.STORED:
                stored.append(chunk)
                chain.append(chunk.prefix_key)
            elif outcome is PutOutcome.REFUSED and self._chained:
                break  # what follows could not be reached
        self.store.used(chain)
        self.summary.stored([c.prefix_key for c in stored], content_keys=[c.content_key for c in stored])
        self.summary.removed(self._evicted)
        self._evicted.clear()

    def restart(self, store: MemoryStore) -> None:
        """Another process with empty memory."""
        self.store = store
        store.on_evict = self._dropped
        self.summary = KeySummary()
        self.life += 1
        self.up = True


def _block(chunk: Chunk, *, chained: bool) -> KVBlock:
    return KVBlock(
        key=chunk.prefix_key,
        parent_key=chunk.parent_key if chained else None,
        content_key=chunk.content_key,
        tokens=chunk.tokens,
        tensors=(),
        nbytes=chunk.end - chunk.start,
        bitwise=True,
        start=chunk.start,
    )


class Queues(Mapping[str, float]):
    """Seconds until each replica that is up could begin. One array: a thousand replicas are no thousand steps."""

    def __init__(self, names: Sequence[str], places: Mapping[str, int], seconds: npt.NDArray[np.float64]) -> None:
        self._names, self._places, self._seconds = names, places, seconds

    def __getitem__(self, name: str) -> float:
        return float(self._seconds[self._places[name]])

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def values(self) -> Any:
        """All of them, in the order of the names."""
        return self._seconds


Strategy = Callable[["Simulation", Request, Mapping[str, float]], str]
"""Chooses among the replicas with a queue (seconds)."""


class Simulation:
    """One run of a fleet over some requests."""

    def __init__(
        self,
        fleet: Fleet,
        strategy: Strategy,
        *,
        count: int,
        outages: Iterable[Outage] = (),
        shared: bool = False,
    ) -> None:
        self.fleet, self.index = fleet, SimulatedIndex()
        self._strategy = strategy
        self._pool = self._store() if fleet.pooled else None
        members = [Replica(n, self._pool or self._store(), chained=fleet.chained) for n in range(fleet.replicas)]
        self.replicas = {replica.name: replica for replica in members}
        self._free_at = np.zeros(fleet.replicas)
        self._asked: Counter[int] = Counter()
        self._count_up()
        self._shared: set[int] | None = set() if shared else None
        self._outages = sorted(outages, key=lambda outage: outage.at)
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._turns = itertools.count()
        self.now = 0.0
        self.outcome = Outcome(ttft=[0.0] * count)

    def _store(self) -> MemoryStore:
        fleet = self.fleet
        return MemoryStore(fleet.capacity * (fleet.replicas if fleet.pooled else 1), policy=fleet.policy())

    def run(self, requests: Iterable[Request]) -> Outcome:
        """Serve them all."""
        for outage in self._outages:
            self._later(outage.at, lambda outage=outage: self._begin(outage))
        for request in requests:
            self._until(request.arrival)
            self.now = request.arrival
            self._arrive(request)
        self._until(float("inf"))
        out = self.outcome
        out.index_bytes, out.index_keys = self.index._table.nbytes, keys_of(self.index)
        out.loads = [replica.sent_tokens for replica in self.replicas.values()]
        return out

    def _later(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (when, next(self._turns), what))

    def _until(self, when: float) -> None:
        while self._coming and self._coming[0][0] <= when:
            self.now, _, what = heapq.heappop(self._coming)
            what()

    def _count_up(self) -> None:
        up = [replica for replica in self.replicas.values() if replica.up]
        self._up_names, self._up_numbers = [r.name for r in up], np.array([r.number for r in up], dtype=np.int64)
        self._up_places = {replica.name: place for place, replica in enumerate(up)}

    def _queues(self) -> Mapping[str, float]:
        """Of the replicas that may be chosen."""
        if self.fleet.balance is None:
            seconds = np.maximum(0.0, self._free_at[self._up_numbers] - self.now)
            return Queues(self._up_names, self._up_places, seconds)
        up = [replica for replica in self.replicas.values() if replica.up]
        bound = (1.0 + self.fleet.balance) * sum(replica.sent_tokens for replica in up) / len(up)
        return {replica.name: 1e-12 * replica.sent_tokens for replica in up if replica.sent_tokens <= bound}

    def _arrive(self, request: Request) -> None:
        queues = self._queues()
        if not queues:  # nobody is there: ask again
            self._later(self.now + 1.0, lambda: self._arrive(request))
            return
        begin = time.perf_counter()
        replica = self.replicas[self._strategy(self, request, queues)]
        self.outcome.router_seconds.append(time.perf_counter() - begin)
        self._serve(replica, request)

    def _serve(self, replica: Replica, request: Request) -> None:
        """What was sent earlier is served earlier, so the store is as it will be when this request's turn comes."""
        costs, tokens = self.fleet.costs, request.prompt.chunk_tokens.tolist()
        here, exact, release = replica.look_up(request)
        names = (request.prompt.prefix_keys if self.fleet.chained else request.prompt.content_keys).tolist()
        admit = self._admitted(names)
        start = max(self.now, float(self._free_at[replica.number]))
        load = costs.load * self._slowness(start)
        seconds, local, from_shared, unbroken = 0.0, 0.0, 0.0, True
        for number, count in enumerate(tokens):
            there = self._shared is not None and names[number] in self._shared
            fetched = load + (0.0 if self.fleet.chained else costs.move)
            unbroken = unbroken and (here[number] or there)
            if here[number]:
                local += count
                seconds += count * (costs.place if number < exact else costs.move)
            elif there and fetched < costs.compute and (unbroken or not self.fleet.chained):
                from_shared += count
                seconds += count * fetched
            else:
                seconds += count * costs.compute
        seconds += costs.compute * (request.prompt.prompt_tokens - sum(tokens))
        replica.keep(request.chunks, here, admit)
        release()
        out = self.outcome
        out.tokens += request.prompt.prompt_tokens
        out.local += local
        out.shared += from_shared
        out.ttft[request.number] = start + seconds - request.arrival
        replica.sent_tokens += request.prompt.prompt_tokens
        self._free_at[replica.number] = finish = start + seconds
        while replica.unfinished and replica.unfinished[0][0] <= self.now:
            replica.unfinished.popleft()
        replica.unfinished.append((finish, request))
        self._tell(replica, names, finish)

    def _admitted(self, names: list[int]) -> list[bool]:
        """Which chunks are kept, if they are not here: those that too few others hold for how often they are asked."""
        most = self.fleet.requests_per_copy
        if most is None or self.fleet.pooled:
            return [True] * len(names)
        self._asked.update(names)
        held = self.index.holders(np.array(names, dtype=np.uint64))
        bits = np.unpackbits(held.view(np.uint8), axis=1, bitorder="little")
        shared = self.index.bit_of(SHARED)
        if shared is not None:
            bits[:, shared] = 0
        copies = bits.sum(axis=1).tolist()
        return [not count or self._asked[name] >= count * most for name, count in zip(names, copies, strict=True)]

    def _tell(self, replica: Replica, names: list[int], finish: float) -> None:
        """Once the prefill is over, the router hears what changed and the shared tier has what was computed."""
        (added, dropped), life = replica.summary.changes(), replica.life

        def told() -> None:
            if replica.life == life and replica.up and not self.fleet.pooled:
                self.index.drop(replica.name, dropped)
                self.index.add(replica.name, added)
            if self._shared is not None and replica.life == life:
                fresh = [name for name in names if name not in self._shared]
                self._shared.update(fresh)
                self.index.add(SHARED, np.array(fresh, dtype=np.uint64))

        self._later(finish + self.fleet.event_delay, told)

    def _slowness(self, when: float) -> float:
        slow = self.fleet.slow
        return slow[2] if slow and slow[0] <= when < slow[1] else 1.0

    def _begin(self, outage: Outage) -> None:
        replica = list(self.replicas.values())[outage.replica]
        replica.up = False
        self._count_up()
        self.index.forget(replica.name)
        back = self.now + outage.seconds
        if outage.drained:
            back = max(self.now, float(self._free_at[replica.number])) + outage.seconds
        else:
            replica.life += 1
            lost = [request for finish, request in replica.unfinished if finish > self.now]
            self.outcome.retried += len(lost)
            for request in lost:
                self._later(self.now, lambda request=request: self._arrive(request))
        replica.unfinished.clear()
        self._later(back, lambda: self._end(replica, back))

    def _end(self, replica: Replica, back: float) -> None:
        replica.restart(self._pool or self._store())
        self._count_up()
        self._free_at[replica.number] = back
