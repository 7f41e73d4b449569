"""The memory store: its contract, its order of eviction, and a model it must agree with whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from time import monotonic
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvboost.core.states import state_chunk
from kvboost.errors import ConfigError
from kvboost.extend import ChunkStore, EvictionPolicy, Lease
from kvboost.store import LeafFirstLRU, LeastExpected, MemoryStore, memory
from kvboost.types import Chunk, KVBlock, PutOutcome
from tests.contracts import ChunkStoreContract
from tests.contracts.store import held_keys, prompt


class TestMemoryStoreContract(ChunkStoreContract):
    def make_store(self, *, capacity_bytes: int, max_chunks: int | None = None) -> ChunkStore:
        return MemoryStore(capacity_bytes, max_chunks=max_chunks)


def block_of(chunk: Chunk, nbytes: int = 100) -> KVBlock:
    return KVBlock(
        key=chunk.prefix_key,
        parent_key=chunk.parent_key,
        content_key=chunk.content_key,
        tokens=chunk.tokens,
        tensors=(),
        nbytes=nbytes,
        bitwise=True,
        tenant=chunk.tenant,
    )


def put_all(store: MemoryStore, chunks: Sequence[Chunk]) -> None:
    for chunk in chunks:
        store.put(block_of(chunk))
    store.used([chunk.prefix_key for chunk in chunks])


def test_what_is_no_capacity_or_no_policy_is_refused_at_once() -> None:
    for capacity, policy, told in (
        ("2GB", None, r"capacity_bytes='2GB' is text; give a number of bytes, such as 2 \* 10\*\*9"),
        (500, LeafFirstLRU, r"policy is a class; give an object of it: LeafFirstLRU\(\)"),
        (500, "lru", "policy='lru' has no inserted, found, used, removed, victim, admits"),
    ):
        with pytest.raises(ConfigError, match=told):
            MemoryStore(capacity, policy=policy)  # type: ignore[arg-type]


def test_the_least_recently_used_prompt_goes_first_from_its_end() -> None:
    store = MemoryStore(500, policy=LeafFirstLRU())
    old, young = prompt("a", "b", "c"), prompt("x", "y")
    put_all(store, old)
    put_all(store, young)
    for number, left in enumerate((2, 1, 0)):
        put_all(store, prompt(f"new {number}"))
        with store.lease(young) as lease:
            assert len(lease.blocks) == 2
        assert store.stats().chunks == 5
        # The policy's order is under test: looking the old prompt up would make it young.
        assert [c.prefix_key in store._entries for c in old] == [i < left for i in range(3)]


def _with_state(*words: str) -> list[Chunk]:
    chunks = prompt(*words)
    return [*chunks, state_chunk(chunks[-1])]


def test_states_take_a_third_of_what_is_held_and_the_least_recently_used_goes_first() -> None:
    store = MemoryStore(4000)
    for chunk in prompt(*"abcdefghij"):
        assert store.put(block_of(chunk)) is PutOutcome.STORED
    for word in "wxyz":
        put_all(store, prompt(word))
    # 1,400 bytes of KV: with 700 of states these are a third.
    made = [_with_state(word) for word in "wxy"]
    for chunks in made:
        assert store.put(block_of(chunks[-1], 300)) is PutOutcome.STORED
        store.lease(made[0]).release()
    assert [held_keys(store, chunks)[-1:] == [chunks[-1].prefix_key] for chunks in made] == [True, False, True]
    assert store.put(block_of(_with_state("z")[-1], 800)) is PutOutcome.REFUSED
    assert store.stats().chunks == 14, "no state left, and no KV evicted for one that does not fit"


def test_a_leased_state_is_not_evicted_for_another() -> None:
    store = MemoryStore(4000)
    for word in "wx":
        put_all(store, prompt(word))
    first, second = _with_state("w"), _with_state("x")
    assert store.put(block_of(first[-1], 400)) is PutOutcome.STORED
    with store.lease(first) as lease:
        assert len(lease.blocks) == 2
        assert store.put(block_of(second[-1], 400)) is PutOutcome.REFUSED
    assert store.put(block_of(second[-1], 400)) is PutOutcome.STORED
    assert held_keys(store, first) == [first[0].prefix_key]


def test_a_lease_makes_a_prompt_young() -> None:
    store = MemoryStore(200, policy=LeafFirstLRU())
    for word in ("a", "b"):
        put_all(store, prompt(word))
    store.lease(prompt("a")).release()
    put_all(store, prompt("c"))
    assert held_keys(store, prompt("b")) == []
    assert len(held_keys(store, prompt("a"))) == 1


def test_the_keys_in_memory_are_told_and_of_too_many_the_most_used() -> None:
    store = MemoryStore(10_000)
    chunks = prompt("a", "b", "c")
    put_all(store, chunks)
    store.open("other")
    theirs = prompt("x", tenant="other")[0]
    store.put(block_of(theirs))
    held = [(chunk.prefix_key, chunk.content_key) for chunk in (*chunks, theirs)]
    assert sorted(store.held_keys(10)) == sorted(held), "of all tenants"
    store.lease(chunks[:2]).release()
    assert sorted(store.held_keys(2)) == sorted(held[:2])
    assert store.held_keys(0) == []


def test_the_block_itself_is_handed_out() -> None:
    """No copy: tensors are shared between readers, and a block found is the block put."""
    store = MemoryStore(1000)
    (chunk,) = prompt("a")
    block, twin = block_of(chunk), block_of(chunk)
    store.put(block)
    assert store.put(twin) is PutOutcome.PRESENT
    with store.lease([chunk]) as lease:
        assert lease.blocks[0] is block


def test_blocks_without_bytes_count_as_chunks() -> None:
    store = MemoryStore(0, max_chunks=1)
    for word in ("a", "b"):
        assert store.put(block_of(prompt(word)[0], nbytes=0)) is PutOutcome.STORED
    assert store.stats().chunks == 1


def test_the_given_policy_decides() -> None:
    class MostRecentFirst(LeafFirstLRU):
        def victim(self, evictable: Any) -> bytes | None:
            return next((key for key in reversed(self._order) if evictable(key)), None)

    store = MemoryStore(200, policy=MostRecentFirst())
    for word in ("a", "b", "c"):
        put_all(store, prompt(word))
    assert [len(held_keys(store, prompt(word))) for word in ("a", "b", "c")] == [1, 0, 1]


def test_stats_name_the_tier_and_close_forgets() -> None:
    store = MemoryStore(1000)
    put_all(store, prompt("a"))
    assert (store.stats().tier, store.stats().capacity_bytes) == ("memory", 1000)
    store.close()
    assert (store.stats().chunks, store.stats().bytes) == (0, 0)


@pytest.mark.parametrize("policy", [LeafFirstLRU, LeastExpected])
def test_a_flood_of_several_tenants_leaves_the_others_their_blocks(policy: Callable[[], EvictionPolicy]) -> None:
    store = MemoryStore(3000, policy=policy())
    put_all(store, prompt("q", "r"))
    loud = ["one", "other"]
    for tenant in loud:
        store.open(tenant)
    for number in range(60):
        for tenant in loud:
            store.lease(prompt(f"{number}", tenant=tenant)).release()
            put_all(store, prompt(f"{number}", tenant=tenant))
    assert held_keys(store, prompt("q", "r")) == [chunk.prefix_key for chunk in prompt("q", "r")]
    assert store.stats().bytes == 3000, "what others leave free is for whoever needs it"
    assert sorted(store.stats(tenant).chunks for tenant in loud) == [14, 14]


def test_who_comes_late_gets_an_even_share() -> None:
    store = MemoryStore(3000, policy=LeafFirstLRU())
    for tenant in ("first", "second", "third"):
        store.open(tenant)
        for number in range(40):
            put_all(store, prompt(f"{number}", tenant=tenant))
    assert [store.stats(tenant).chunks for tenant in ("first", "second", "third")] == [10, 10, 10]


def test_who_was_not_opened_counts_to_the_stores_own() -> None:
    store = MemoryStore(1000)
    store.open("one")
    put_all(store, prompt("a", tenant="one"))
    put_all(store, prompt("a", "b", tenant="nobody"))
    put_all(store, prompt("a"))
    counted = [store.stats(tenant).chunks for tenant in ("one", "nobody", "", None)]
    assert counted == [1, 3, 3, 4]
    store.close("one")
    assert [store.stats(tenant).chunks for tenant in ("one", None)] == [3, 3]


def test_who_makes_no_lookups_keeps_nothing_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(300, policy=LeafFirstLRU())
    put_all(store, prompt("old"))
    later = monotonic() + 3601
    monkeypatch.setattr(memory, "monotonic", lambda: later)
    store.open("here")
    for number in range(3):
        put_all(store, prompt(f"{number}", tenant="here"))
    assert (store.stats("").chunks, store.stats("here").chunks) == (0, 3)


# A model: the same rules written the slow and obvious way.

PROMPTS = {"".join(words): prompt(*words) for length in (1, 2, 3) for words in product("abc", repeat=length)}
prompts = st.sampled_from(list(PROMPTS))  # by their words, which print better than chunks
# Mostly blocks of one size and room for a few: then leases, successors and age all stand in the way of evictions.
sizes = st.one_of(st.just(10), st.just(10), st.integers(0, 60))
capacities = st.sampled_from([40, 30, 50, 60, 20, 85, 150, 0])
limits = st.sampled_from([None, None, None, 3, 4, 6, 0])


@dataclass
class Model:
    """Everything is searched for, nothing is counted along: no counter can drift."""

    capacity: int
    max_chunks: int | None
    blocks: list[KVBlock] = field(default_factory=list)
    """In the order of eviction: first, the next to go."""
    leases: list[list[KVBlock]] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    rejected: int = 0
    evictions: int = 0
    refused: int = 0

    def find(self, key: bytes | None) -> KVBlock | None:
        return next((block for block in self.blocks if block.key == key), None)

    def put(self, block: KVBlock) -> PutOutcome:
        if self.find(block.key):
            return PutOutcome.PRESENT
        if (block.parent_key is not None and not self.find(block.parent_key)) or block.nbytes > self.capacity:
            self.refused += 1
            return PutOutcome.REFUSED
        while not self.fits(block):
            needed = {b.parent_key for b in [*self.blocks, block]}
            leased = {id(b) for lease in self.leases for b in lease}
            victim = next((b for b in self.blocks if b.key not in needed and id(b) not in leased), None)
            if victim is None:
                self.refused += 1
                return PutOutcome.REFUSED
            self.blocks.remove(victim)
            self.evictions += 1
        self.blocks.append(block)
        return PutOutcome.STORED

    def fits(self, block: KVBlock) -> bool:
        within_bytes = sum(b.nbytes for b in [*self.blocks, block]) <= self.capacity
        return within_bytes and (self.max_chunks is None or len(self.blocks) < self.max_chunks)

    def used(self, chain: Sequence[bytes]) -> None:
        for key in reversed(chain):
            if block := self.find(key):
                self.blocks.remove(block)
                self.blocks.append(block)

    def lease(self, chunks: Sequence[Chunk]) -> list[KVBlock]:
        held: list[KVBlock] = []
        for chunk in chunks:
            block = self.find(chunk.prefix_key)
            if block is None or block.tokens != chunk.tokens:
                self.rejected += block is not None
                break
            held.append(block)
        self.hits += len(held)
        self.misses += len(chunks) - len(held)
        self.used([block.key for block in held])
        return held


class MemoryStoreMachine(RuleBasedStateMachine):
    """Any sequence of calls gives what the model says, and the invariants hold after each."""

    @initialize(capacity=capacities, max_chunks=limits)
    def make(self, capacity: int, max_chunks: int | None) -> None:
        self.store = MemoryStore(capacity, max_chunks=max_chunks, policy=LeafFirstLRU())
        self.model = Model(capacity, max_chunks)
        self.leases: list[tuple[Lease, list[KVBlock]]] = []
        self.forgotten = 0  # leases[:forgotten] are from before the last clear

    def offer(self, chunk: Chunk, nbytes: int) -> None:
        block = block_of(chunk, nbytes)
        assert self.store.put(block) is self.model.put(block)

    @rule(words=prompts, nbytes=sizes)
    def put_one(self, words: str, nbytes: int) -> None:
        self.offer(PROMPTS[words][-1], nbytes)

    @rule(several=st.lists(prompts, min_size=1, max_size=4), nbytes=sizes)
    def read_prompts(self, several: list[str], nbytes: int) -> None:
        """As the engine does it: lease, put the rest, mark all as used, release."""
        for words in several:
            self.read(PROMPTS[words], nbytes)

    def read(self, chunks: list[Chunk], nbytes: int) -> None:
        with self.store.lease(chunks) as lease:
            held = self.model.lease(chunks)
            assert list(lease.blocks) == held
            self.model.leases.append(held)
            for chunk in chunks[len(held) :]:
                self.offer(chunk, nbytes)
            self.model.leases.pop()
        self.store.used([chunk.prefix_key for chunk in chunks])
        self.model.used([chunk.prefix_key for chunk in chunks])

    @rule(words=prompts)
    def lease(self, words: str) -> None:
        chunks = PROMPTS[words]
        held = self.model.lease(chunks)
        self.leases.append((self.store.lease(chunks), held))
        self.model.leases.append(held)

    @rule(words=prompts, data=st.data())
    def lease_with_other_tokens(self, words: str, data: Any) -> None:
        chunks = PROMPTS[words]
        at = data.draw(st.integers(0, len(chunks) - 1))
        lie = [*chunks[:at], chunks[at]._replace(tokens=b"lie!"), *chunks[at + 1 :]]
        with self.store.lease(lie) as lease:
            assert list(lease.blocks) == self.model.lease(lie)
            assert len(lease.blocks) <= at

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        at = data.draw(st.integers(0, len(self.leases) - 1))
        lease, _ = self.leases.pop(at)
        self.model.leases.pop(at)
        self.forgotten -= at < self.forgotten
        lease.release()
        lease.release()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def find_what_is_leased(self, data: Any) -> None:
        """Leased blocks never vanish, unless somebody clears the store."""
        at = data.draw(st.integers(0, len(self.leases) - 1))
        _, held = self.leases[at]
        chunks = next(p for p in [*PROMPTS.values(), []] if [c.prefix_key for c in p] == [b.key for b in held])
        with self.store.lease(chunks) as again:
            assert list(again.blocks) == self.model.lease(chunks)
            if at >= self.forgotten:
                assert all(new is old for new, old in zip(again.blocks, held, strict=True))

    @rule(words=prompts)
    def used(self, words: str) -> None:
        chain = [chunk.prefix_key for chunk in PROMPTS[words]]
        self.store.used(chain)
        self.model.used(chain)

    @rule(really=st.sampled_from([False, False, False, True]))
    def clear(self, really: bool) -> None:
        if not really:  # an empty store has nothing to go wrong: keep most runs going
            return
        self.store.clear()
        self.model.blocks.clear()
        self.forgotten = len(self.leases)

    @invariant()
    def leases_stay_readable(self) -> None:
        for lease, held in self.leases:
            assert all(new is old for new, old in zip(lease.blocks, held, strict=True))

    @invariant()
    def the_ledger_holds(self) -> None:
        stored = {key: entry.block for key, entry in self.store._entries.items()}
        stats = self.store.stats()
        assert stats.chunks == len(stored)
        assert stats.bytes == sum(block.nbytes for block in stored.values()) <= self.model.capacity
        assert self.model.max_chunks is None or stats.chunks <= self.model.max_chunks
        assert all(block.parent_key is None or block.parent_key in stored for block in stored.values())
        assert stored == {block.key: block for block in self.model.blocks}
        assert (stats.hits, stats.misses, stats.rejected, stats.evictions, stats.refused, stats.leased) == (
            self.model.hits,
            self.model.misses,
            self.model.rejected,
            self.model.evictions,
            self.model.refused,
            sum(len(held) for _, held in self.leases),
        )

    def teardown(self) -> None:
        for lease, _ in getattr(self, "leases", []):
            lease.release()
            assert self.store.stats().leased >= 0
        if hasattr(self, "store"):
            assert self.store.stats().leased == 0


TestMemoryStoreAgainstTheModel = MemoryStoreMachine.TestCase
TestMemoryStoreAgainstTheModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
