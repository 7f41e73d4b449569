"""What every chunk store must do, wherever it keeps its blocks and whichever block it evicts first.

Subclass :class:`ChunkStoreContract` in a pytest file. Invariant: no rule here names an eviction order.
Blocks carry no tensors and may claim any size, so the suite needs no torch and no memory; a store that
measures blocks itself overrides :meth:`ChunkStoreContract.make_block`.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

from kvboost.errors import StoreError
from kvboost.extend import ChunkStore
from kvboost.types import Chunk, PutOutcome, StoreStats

from .content import SIZE, ContentRules, prompt

_SIZE = SIZE


def held_keys(store: ChunkStore, chunks: Sequence[Chunk]) -> list[bytes]:
    """The keys a lease of ``chunks`` gets; the lease is released at once."""
    with store.lease(chunks) as lease:
        return [block.key for block in lease.blocks]


class ChunkStoreContract(ContentRules):
    """The rules of :class:`kvboost.extend.ChunkStore`. Override :meth:`make_store`."""

    def put_all(self, store: ChunkStore, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Offer every chunk's block, first chunk first."""
        return [store.put(self.make_block(chunk)) for chunk in chunks]

    # Finding

    def test_is_a_chunk_store(self) -> None:
        """It has every method of the Protocol."""
        with closing(self.make_store(capacity_bytes=1000)) as store:
            assert isinstance(store, ChunkStore), "a method of ChunkStore is missing"

    def test_what_was_put_is_found(self) -> None:
        """The blocks come back unchanged, first chunk first."""
        chunks = prompt("a", "b", "c")
        with closing(self.make_store(capacity_bytes=1000)) as store:
            assert self.put_all(store, chunks) == [PutOutcome.STORED] * 3, "an empty store did not keep a block"
            with store.lease(chunks) as lease:
                found = [(b.key, b.parent_key, b.content_key, b.tokens, b.nbytes, b.bitwise) for b in lease.blocks]
            asked = [(c.prefix_key, c.parent_key, c.content_key, c.tokens, _SIZE, True) for c in chunks]
            assert found == asked, "the blocks found are not the blocks put"

    def test_nothing_is_found_in_an_empty_store(self) -> None:
        """A miss is an empty lease, not an error. So is asking for nothing."""
        with closing(self.make_store(capacity_bytes=1000)) as store:
            assert held_keys(store, prompt("a", "b")) == [], "a hit in an empty store"
            assert held_keys(store, []) == [], "a hit although nothing was asked for"

    def test_a_shorter_or_longer_prompt_shares_its_beginning(self) -> None:
        """Only the common leading chunks are found; what diverges is a miss."""
        with closing(self.make_store(capacity_bytes=1000)) as store:
            self.put_all(store, prompt("a", "b", "c"))
            for asked, expected in (("a", 1), ("abcd", 3), ("abx", 2), ("xbc", 0), ("bc", 0)):
                found = len(held_keys(store, prompt(*asked)))
                assert found == expected, f"asked for {asked} with abc stored: {found} found, {expected} expected"

    def test_a_gap_ends_the_run(self) -> None:
        """KV behind a missing chunk is of no use: it must not be handed out as if nothing were missing."""
        first, second = prompt("a", "b")
        with closing(self.make_store(capacity_bytes=1000)) as store:
            self.put_all(store, [first, second])
            found = held_keys(store, [first, *prompt("missing"), second])
            assert found == [first.prefix_key], "a block behind a missing one was found"

    def test_other_tokens_under_the_same_key_are_a_miss(self) -> None:
        """A key that lies must not bring wrong KV: tokens are compared, and the run ends before the lie."""
        chunks = prompt("a", "b", "c")
        lie = chunks[1]._replace(tokens=prompt("other")[0].tokens)
        with closing(self.make_store(capacity_bytes=1000)) as store:
            self.put_all(store, chunks)
            found = held_keys(store, [chunks[0], lie, chunks[2]])
            assert found == [chunks[0].prefix_key], "a block with other tokens was found"
            stats = store.stats()
            assert stats.rejected == 1, f"the mismatch was counted {stats.rejected} times as rejected, not once"
            assert (stats.hits, stats.misses) == (1, 2), "the mismatch and what follows it must count as misses"

    # Keeping

    def test_the_same_block_twice_is_present(self) -> None:
        """The second offer changes nothing, not even in a full store."""
        (chunk,) = prompt("a")
        with closing(self.make_store(capacity_bytes=_SIZE)) as store:
            store.put(self.make_block(chunk))
            before = store.stats()
            assert store.put(self.make_block(chunk)) is PutOutcome.PRESENT, "a block that is stored is PRESENT"
            assert store.stats() == before, "offering a stored block again changed the counters"
            assert held_keys(store, [chunk]) == [chunk.prefix_key], "offering a stored block again lost it"

    def test_an_orphan_is_refused(self) -> None:
        """No lookup could reach a block whose parent is not stored."""
        first, second = prompt("a", "b")
        with closing(self.make_store(capacity_bytes=1000)) as store:
            assert store.put(self.make_block(second)) is PutOutcome.REFUSED, "an orphan was kept"
            _expect(store.stats(), chunks=0, bytes=0, refused=1)
            assert self.put_all(store, [first, second]) == [PutOutcome.STORED] * 2, "with its parent it can be kept"

    def test_a_block_larger_than_the_store_is_refused(self) -> None:
        """And nothing is thrown away for it."""
        chunks = prompt("a", "b")
        with closing(self.make_store(capacity_bytes=2 * _SIZE)) as store:
            self.put_all(store, chunks)
            (large,) = prompt("large")
            assert store.put(self.make_block(large, 2 * _SIZE + 1)) is PutOutcome.REFUSED, "larger than the store"
            _expect(store.stats(), chunks=2, bytes=2 * _SIZE, refused=1, evictions=0)
            assert len(held_keys(store, chunks)) == 2, "blocks were lost to a block that could never fit"

    def test_a_store_without_capacity_keeps_nothing(self) -> None:
        """A budget of zero turns the cache off without errors."""
        for capacity, limit in ((0, None), (1000, 0)):
            with closing(self.make_store(capacity_bytes=capacity, max_chunks=limit)) as store:
                outcomes = self.put_all(store, prompt("a", "b"))
                assert outcomes == [PutOutcome.REFUSED] * 2, "a store without capacity kept a block"
                _expect(store.stats(), chunks=0, bytes=0)

    def test_the_byte_budget_is_never_exceeded(self) -> None:
        """Not by blocks of any size in any order; and a block that fits is stored while nothing is leased."""
        sizes = [1000, 500, 501, 999, 2, *random.Random(0).choices(range(1, 1001), k=60)]  # one byte over, first
        with closing(self.make_store(capacity_bytes=1000)) as store:
            for number, size in enumerate(sizes):
                (chunk,) = prompt(f"text {number}")
                outcome = store.put(self.make_block(chunk, size))
                assert outcome is PutOutcome.STORED, "a block that fits was refused although everything could go"
                _within(store.stats(), capacity=1000)
            assert store.stats().evictions > 0, "65 blocks of some 500 bytes in 1000 bytes, and no eviction counted"

    def test_the_chunk_limit_is_never_exceeded(self) -> None:
        """However small the blocks are."""
        with closing(self.make_store(capacity_bytes=10**9, max_chunks=3)) as store:
            for number in range(12):
                outcomes = self.put_all(store, prompt(f"text {number}"))
                assert outcomes == [PutOutcome.STORED], "a block was refused although another could go"
                _within(store.stats(), capacity=10**9, max_chunks=3)
            _expect(store.stats(), chunks=3, evictions=9)

    # Evicting

    def test_successors_are_evicted_before_what_they_follow(self) -> None:
        """Every stored block stays reachable: a chunk goes only after all that stand behind it."""
        prompts = [prompt("head", "left", "end"), prompt("head", "right"), prompt("other", "text")]
        with closing(self.make_store(capacity_bytes=6 * _SIZE)) as store:
            for chunks in prompts:
                self.put_all(store, chunks)
            store.used([chunk.prefix_key for chunk in prompts[2]])  # makes the forked prompts the older ones
            for number in range(12):
                prompts.append(prompt(f"new {number}"))
                self.put_all(store, prompts[-1])
                reachable = {key for chunks in prompts for key in held_keys(store, chunks)}
                _expect(store.stats(), chunks=len(reachable), bytes=_SIZE * len(reachable))

    def test_making_room_never_evicts_the_parent(self) -> None:
        """A block that fits only in its parent's place is refused: without the parent it is unreachable."""
        first, second = prompt("a", "b")
        with closing(self.make_store(capacity_bytes=_SIZE)) as store:
            assert self.put_all(store, [first, second]) == [PutOutcome.STORED, PutOutcome.REFUSED]
            assert held_keys(store, [first]) == [first.prefix_key], "the parent was evicted for its successor"
            # The refusal must leave no trace: the parent has no successor and may go like any other block.
            assert self.put_all(store, prompt("x")) == [PutOutcome.STORED], "the parent can no longer be evicted"

    def test_a_leased_block_is_not_evicted(self) -> None:
        """Whatever is put meanwhile; the lease can be read to its end, and then the block may go."""
        chunks = prompt("a", "b")
        with closing(self.make_store(capacity_bytes=3 * _SIZE)) as store:
            self.put_all(store, chunks)
            with store.lease(chunks) as lease:
                for number in range(6):  # no lookup in between: it would make the leased blocks recent
                    self.put_all(store, prompt(f"text {number}"))
                    _within(store.stats(), capacity=3 * _SIZE)
                assert [block.tokens for block in lease.blocks] == [chunk.tokens for chunk in chunks]
                assert len(held_keys(store, chunks)) == 2, "a leased block was evicted"
            outcomes = self.put_all(store, prompt("fills", "the", "store"))
            assert outcomes == [PutOutcome.STORED] * 3, "a block whose lease was released can no longer be evicted"

    def test_a_store_full_of_leased_blocks_refuses(self) -> None:
        """Refusing is always allowed; passing the budget or taking a leased block never is."""
        chunks = prompt("a", "b")
        with closing(self.make_store(capacity_bytes=2 * _SIZE)) as store:
            self.put_all(store, chunks)
            with store.lease(chunks), store.lease(chunks[:1]):
                assert self.put_all(store, prompt("x")) == [PutOutcome.REFUSED], "full, but not refused"
                _expect(store.stats(), chunks=2, bytes=2 * _SIZE, refused=1, evictions=0)
            assert self.put_all(store, prompt("x")) == [PutOutcome.STORED], "not full, but refused"

    def test_one_of_two_leases_protects(self) -> None:
        """Releasing one lease does not release another one's blocks."""
        chunks = prompt("a")
        with closing(self.make_store(capacity_bytes=_SIZE)) as store:
            self.put_all(store, chunks)
            one, other = store.lease(chunks), store.lease(chunks)
            one.release()
            one.release()
            assert self.put_all(store, prompt("x")) == [PutOutcome.REFUSED], "a leased block was evicted"
            other.release()
            assert self.put_all(store, prompt("x")) == [PutOutcome.STORED], "a released block was not evicted"

    def test_used_with_unknown_keys_is_harmless(self) -> None:
        """The blocks may have been evicted since. It is no lookup: no counter moves."""
        chunks = prompt("a", "b")
        with closing(self.make_store(capacity_bytes=1000)) as store:
            self.put_all(store, chunks[:1])
            before = store.stats()
            store.used([])
            store.used([*(chunk.prefix_key for chunk in chunks), b"no key of ours"])
            assert store.stats() == before, "used() changed the counters"
            assert held_keys(store, chunks) == [chunks[0].prefix_key], "used() changed what is stored"

    # Leasing

    def test_a_released_lease_is_empty_handed(self) -> None:
        """Reading blocks that may be evicted any moment is an error in the caller and is named as one."""
        chunks = prompt("a")
        with closing(self.make_store(capacity_bytes=1000)) as store:
            self.put_all(store, chunks)
            for asked in (chunks, prompt("missing")):
                lease = store.lease(asked)
                lease.release()
                try:
                    lease.blocks  # noqa: B018
                except StoreError:
                    continue
                raise AssertionError("blocks can be read from a released lease")

    def test_releasing_twice_is_harmless(self) -> None:
        """A lease may be released by its user and again by the ``with`` block around it."""
        chunks = prompt("a", "b")
        with closing(self.make_store(capacity_bytes=1000)) as store:
            self.put_all(store, chunks)
            with store.lease(chunks) as lease:
                lease.release()
            lease.release()
            _expect(store.stats(), leased=0, chunks=2)

    def test_leased_counts_back_to_zero(self) -> None:
        """Even when the reader fails: what stays leased for ever can never be evicted."""
        chunks = prompt("a", "b")
        with closing(self.make_store(capacity_bytes=1000)) as store:
            self.put_all(store, chunks)
            try:
                with store.lease(chunks), store.lease(chunks):
                    assert store.stats().leased > 0, "blocks are leased but not counted"
                    raise KeyError("the reader failed")
            except KeyError:
                pass
            else:
                raise AssertionError("the lease swallowed its reader's error")
            _expect(store.stats(), leased=0)

    # Forgetting

    def test_clear_forgets(self) -> None:
        """Everything, and the store goes on as if new."""
        chunks = prompt("a", "b")
        with closing(self.make_store(capacity_bytes=2 * _SIZE)) as store:
            self.put_all(store, chunks)
            store.clear()
            _expect(store.stats(), chunks=0, bytes=0)
            assert held_keys(store, chunks) == [], "a cleared store still finds blocks"
            assert self.put_all(store, chunks) == [PutOutcome.STORED] * 2, "a cleared store refuses blocks"

    def test_clear_leaves_leases_readable(self) -> None:
        """A request that is under way when the cache is cleared ends as it began."""
        chunks = prompt("a", "b")
        with closing(self.make_store(capacity_bytes=1000)) as store:
            self.put_all(store, chunks)
            with store.lease(chunks) as lease:
                store.clear()
                assert [block.tokens for block in lease.blocks] == [chunk.tokens for chunk in chunks]
                _expect(store.stats(), chunks=0, bytes=0)
            _expect(store.stats(), leased=0, chunks=0, bytes=0)

    def test_a_lease_from_before_clear_frees_nothing_after_it(self) -> None:
        """The same text stored again is another block: an old lease must not take a new one's protection."""
        chunks = prompt("a")
        with closing(self.make_store(capacity_bytes=_SIZE)) as store:
            self.put_all(store, chunks)
            old = store.lease(chunks)
            store.clear()
            self.put_all(store, chunks)
            with store.lease(chunks):
                old.release()
                assert self.put_all(store, prompt("x")) == [PutOutcome.REFUSED], "a leased block was evicted"
            assert self.put_all(store, prompt("x")) == [PutOutcome.STORED], "a released block was not evicted"

    # Counting

    def test_the_counters_add_up(self) -> None:
        """Hits and misses are what was asked for; what was stored is there or was evicted."""
        chooser = random.Random(0)
        outcomes: Counter[PutOutcome] = Counter()
        asked = found = 0
        with closing(self.make_store(capacity_bytes=5 * _SIZE)) as store:
            for _ in range(80):
                chunks = prompt(*chooser.choices("abc", k=chooser.randint(1, 4)))
                with store.lease(chunks) as lease:
                    asked, found = asked + len(chunks), found + len(lease.blocks)
                    outcomes.update(self.put_all(store, chunks[len(lease.blocks) :]))
                stats = store.stats()
                _within(stats, capacity=5 * _SIZE)
                _expect(stats, capacity_bytes=5 * _SIZE, hits=found, misses=asked - found, rejected=0, leased=0)
                _expect(stats, chunks=outcomes[PutOutcome.STORED] - stats.evictions, bytes=_SIZE * stats.chunks)
                _expect(stats, refused=outcomes[PutOutcome.REFUSED])

    def test_many_threads(self) -> None:
        """Eight readers and writers at once: the ledger holds at every moment and adds up at the end."""
        capacity, limit, threads, rounds = 12 * _SIZE, 10, 8, 60
        prompts = [prompt(*words) for words in ("abcd", "abce", "abf", "axyz", "pqrs", "pqt", "uvw", "u")]
        failures: list[BaseException] = []
        asked: list[int] = []
        stored: list[int] = []
        start = threading.Barrier(threads)

        def work(seed: int, store: ChunkStore) -> None:
            chooser = random.Random(seed)
            try:
                start.wait()
                for _ in range(rounds):
                    chunks = chooser.choice(prompts)
                    with store.lease(chunks) as lease:
                        tokens = [block.tokens for block in lease.blocks]
                        outcomes = self.put_all(store, chunks[len(tokens) :])
                        _within(store.stats(), capacity=capacity, max_chunks=limit)
                        assert tokens == [c.tokens for c in chunks[: len(tokens)]], "a lease holds other blocks"
                        assert [b.tokens for b in lease.blocks] == tokens, "a lease changed while it was held"
                        found = held_keys(store, chunks[: len(tokens)])
                        assert len(found) == len(tokens), "a leased block was evicted"
                    store.used([chunk.prefix_key for chunk in chunks])
                    asked.append(len(chunks) + len(tokens))
                    stored.append(outcomes.count(PutOutcome.STORED))
            except BaseException as error:  # noqa: BLE001 (a thread cannot raise into the test)
                failures.append(error)

        with closing(self.make_store(capacity_bytes=capacity, max_chunks=limit)) as store:
            workers = [threading.Thread(target=work, args=(seed, store)) for seed in range(threads)]
            interval = sys.getswitchinterval()
            sys.setswitchinterval(1e-5)  # a race that needs a switch in one place is rare at the usual 5 ms
            try:
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
            finally:
                sys.setswitchinterval(interval)
            if failures:
                raise AssertionError(f"a thread failed: {failures[0]!r}") from failures[0]
            stats = store.stats()
            _expect(stats, hits=sum(asked) - stats.misses, chunks=sum(stored) - stats.evictions, leased=0)
            reachable = {key for chunks in prompts for key in held_keys(store, chunks)}
            _expect(stats, chunks=len(reachable), bytes=_SIZE * len(reachable))


def _expect(stats: StoreStats, **values: int) -> None:
    """The named counters have these values."""
    for name, value in values.items():
        actual = getattr(stats, name)
        assert actual == value, f"stats().{name} is {actual}, expected {value}: {stats}"


def _within(stats: StoreStats, *, capacity: int, max_chunks: int | None = None) -> None:
    """The store is within its limits and no counter is below zero."""
    assert stats.bytes <= capacity, f"{stats.bytes} bytes held, {capacity} allowed"
    assert max_chunks is None or stats.chunks <= max_chunks, f"{stats.chunks} chunks held, {max_chunks} allowed"
    counters = (stats.chunks, stats.bytes, stats.hits, stats.misses, stats.evictions, stats.refused, stats.leased)
    assert min(counters) >= 0, f"a counter is below zero: {stats}"
