"""What every tier must do, wherever it keeps its blocks and whichever block it evicts first.

Subclass :class:`TierContract` in a pytest file. Invariants: no rule here names an eviction order, nor how many bytes a
tier counts for a block beside its tensors; a tier without a limit of its own need keep none; rules about what others
see are checked only where the tier outlives its process.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch

from kvboost.core.keys import variant_key
from kvboost.extend import Tier
from kvboost.store.record.header import info_of
from kvboost.types import Chunk, Namespace, PutOutcome, StoreStats

from .blocks import SIZE, assert_same, block_of, namespace
from .content import prompt

_LARGE = 10**8
_MANY = 64  # more variants than a lookup may give


def _keys(chunks: Sequence[Chunk]) -> list[bytes]:
    return [chunk.prefix_key for chunk in chunks]


class TierContract:
    """The rules of :class:`kvboost.extend.Tier`. Override :meth:`make_tier`."""

    evicts = True
    """False for a tier that leaves eviction to somebody else: what does not fit is then refused."""
    has_limit = True
    """False for a tier on a server whose limit and eviction are its own: then no rule about them is checked."""
    counts = True
    """False for a tier that cannot tell how many blocks lie there."""

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        """A tier with these limits. Its storage is empty when a test begins; within a test every call opens the same.

        A tier that dies with its process gives a new, empty one each time. The suite closes it.
        """
        raise NotImplementedError("return the tier under test")

    def open(self, capacity_bytes: int = _LARGE, *, of: Namespace | None = None) -> closing[Tier]:
        """A tier for one ``with`` block."""
        return closing(self.make_tier(capacity_bytes=capacity_bytes, namespace=of or namespace()))

    def capacity_for(self, count: int) -> int:
        """A capacity for this many blocks of the usual size and no more."""
        if not self.has_limit:
            return _LARGE
        with self.open() as tier:
            tier.store(block_of(prompt("a")[0]))
            each = tier.stats().bytes
            tier.clear()
        assert each >= SIZE, f"a block of {SIZE} bytes is counted as {each}"
        return each * count + each // 2

    def store_all(self, tier: Tier, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Store every chunk's block, first chunk first."""
        return [tier.store(block_of(chunk)) for chunk in chunks]

    # Finding

    def test_is_a_tier(self) -> None:
        """It has every method of the Protocol, and a name."""
        with self.open() as tier:
            assert isinstance(tier, Tier), "a method of Tier is missing"
            assert tier.name, "a tier without a name"
            assert tier.stats().tier == tier.name, "the statistics name another tier"

    def test_what_was_stored_is_loaded(self) -> None:
        """Whole, to the bit, in the order asked for, None where there is nothing."""
        blocks = [block_of(chunk) for chunk in prompt("a", "b", "c")]
        with self.open() as tier:
            assert [tier.store(block) for block in blocks] == [PutOutcome.STORED] * 3, "an empty tier kept nothing"
            missing = prompt("x")[0].prefix_key
            asked = [blocks[2].key, missing, blocks[0].key, blocks[1].key, blocks[0].key]
            found = list(tier.load(asked))
            assert len(found) == 5, "one answer for each key, also for one asked for twice"
            assert found[1] is None, "a block that was never stored was found"
            for block, original in zip((found[0], *found[2:]), (blocks[i] for i in (2, 0, 1, 0)), strict=True):
                assert_same(block, original)
            assert list(tier.contains(asked)) == [True, False, True, True, True], "contains() says something else"

    def test_every_dtype_shape_and_field_survives(self) -> None:
        """Odd sizes, empty tensors, no tensors, NaN, long contexts."""
        chunks = prompt("a", "b", "c", "d")
        nan = torch.tensor([float("nan"), -0.0, float("inf")])
        dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int64)
        several = tuple(torch.arange(2 * n + 1).to(dtype).reshape(1, -1, 1) for n, dtype in enumerate(dtypes))
        kinds = [(nan,), several, (), (torch.empty(2, 0, 3), torch.ones(3, 5).t())]
        blocks = [
            replace(
                block_of(chunk),
                tensors=tensors,
                nbytes=sum(t.numel() * t.element_size() for t in tensors),
                bitwise=at % 2 == 0,
                start=at * 10**6,
                context=b"12345678" * at * 5,
                approx_depth=at,
            )
            for at, (chunk, tensors) in enumerate(zip(chunks, kinds, strict=True))
        ]
        with self.open() as tier:
            for block in blocks:
                assert tier.store(block) is PutOutcome.STORED, "a block was refused for what it holds"
            for found, block in zip(tier.load([block.key for block in blocks]), blocks, strict=True):
                assert_same(found, block)

    def test_nothing_is_found_in_an_empty_tier(self) -> None:
        """A miss is no error. So is asking for nothing."""
        chunks = prompt("a", "b")
        with self.open() as tier:
            assert list(tier.contains(_keys(chunks))) == [False, False]
            assert list(tier.load(_keys(chunks))) == [None, None]
            assert [list(found) for found in tier.variants([chunks[0].content_key])] == [[]]
            assert (list(tier.contains([])), list(tier.load([])), list(tier.variants([]))) == ([], [], [])
            assert (tier.stats().hits, tier.stats().misses) == (0, 2), "two misses were loaded"

    def test_a_load_may_be_given_up(self) -> None:
        """The reader stops at the first miss; the tier goes on as if nothing had been asked."""
        chunks = prompt(*"abcdefghijkl")
        with self.open() as tier:
            self.store_all(tier, chunks)
            for taken in (0, 1, 3):
                loading = iter(tier.load(_keys(chunks)))
                for _ in range(taken):
                    assert next(loading) is not None
                del loading
            assert all(block is not None for block in tier.load(_keys(chunks))), "a load given up broke the next"

    def test_blocks_stay_whole_after_they_are_gone(self) -> None:
        """What was loaded belongs to the reader."""
        chunks = prompt("a", "b")
        with self.open() as tier:
            self.store_all(tier, chunks)
            found = list(tier.load(_keys(chunks)))
            tier.remove(_keys(chunks))
        for block, chunk in zip(found, chunks, strict=True):
            assert_same(block, block_of(chunk))

    def test_content_is_found_wherever_it_was_computed(self) -> None:
        """With all that is needed to choose, newest last."""
        with self.open() as tier:
            for words in (("a", "z"), ("b", "z"), ("z",)):
                self.store_all(tier, prompt(*words))
            wanted = [prompt(word)[0].content_key for word in ("z", "missing", "a")]
            found = [list(infos) for infos in tier.variants(wanted)]
            ends = [prompt("a", "z")[1], prompt("b", "z")[1], prompt("z")[0]]
            assert sorted(found[0], key=lambda info: info.key) == sorted(
                (info_of(block_of(chunk)) for chunk in ends), key=lambda info: info.key
            ), "not every block with this content was found, or a field changed"
            assert found[0][-1].key == ends[-1].prefix_key, "the newest stands last"
            assert found[1] == [], "content that was never stored was found"
            assert [info.key for info in found[2]] == [prompt("a")[0].prefix_key]

    def test_only_a_few_variants_are_named(self) -> None:
        """However many there are; the newest is among them. Tiers may refuse to keep so many."""
        content = prompt("z")[0].content_key
        with self.open() as tier:
            for number in range(_MANY):
                chunk = prompt(f"w{number}", "z")[1]
                key = variant_key(content, chunk.prefix_key[:8])
                variant = replace(block_of(chunk, 10), key=key, parent_key=None, approx_depth=1, bitwise=False)
                if tier.store(variant) is PutOutcome.STORED:
                    newest = key
            (found,) = tier.variants([content])
            assert 0 < len(found) < _MANY, f"{len(found)} variants named"
            assert found[-1].key == newest, "the newest variant is not the last"
            assert all(info.content_key == content for info in found)

    # Keeping

    def test_the_same_block_twice_is_present(self) -> None:
        """The second one changes nothing, not even in a full tier."""
        (chunk,) = prompt("a")
        with self.open(self.capacity_for(1)) as tier:
            self.store_all(tier, [chunk])
            before = tier.stats()
            assert tier.store(block_of(chunk)) is PutOutcome.PRESENT, "a block that is stored is PRESENT"
            assert tier.stats() == before, "storing a block again changed the counters"
            assert_same(next(iter(tier.load(_keys([chunk])))), block_of(chunk))

    def test_a_block_larger_than_the_tier_is_refused(self) -> None:
        """And nothing is thrown away for it."""
        if not self.has_limit:
            return
        chunks = prompt("a", "b")
        capacity = self.capacity_for(2)
        with self.open(capacity) as tier:
            self.store_all(tier, chunks)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a tier may say so
                outcome = tier.store(block_of(prompt("large")[0], capacity + 1))
            assert outcome is PutOutcome.REFUSED, "larger than the tier"
            assert list(tier.contains(_keys(chunks))) == [True, True], "blocks were lost to one that could not fit"
            assert (tier.stats().refused, tier.stats().evictions) == (1, 0)

    def test_a_tier_without_capacity_keeps_nothing(self) -> None:
        """A budget of zero turns it off without errors."""
        if not self.has_limit:
            return
        chunks = prompt("a", "b")
        with self.open(0) as tier:
            assert self.store_all(tier, chunks) == [PutOutcome.REFUSED] * 2, "a tier without capacity kept a block"
            assert list(tier.load(_keys(chunks))) == [None, None]
            assert (tier.stats().chunks, tier.stats().bytes) == (0, 0)

    def test_the_byte_budget_is_never_exceeded(self) -> None:
        """Not by blocks of any size in any order; and a block that fits is stored."""
        if not self.has_limit:
            return
        capacity = self.capacity_for(10)
        with self.open(capacity) as tier:
            for number, size in enumerate(random.Random(0).choices(range(1, 9 * SIZE), k=60)):
                outcome = tier.store(block_of(prompt(f"text {number}")[0], size))
                assert not self.evicts or outcome is PutOutcome.STORED, (
                    "a block that fits was refused although everything could go"
                )
                self._within(tier.stats(), capacity)
            assert (tier.stats().evictions > 0) == self.evicts, "60 blocks in a capacity for ten, no eviction counted"

    def test_successors_are_evicted_before_what_they_follow(self) -> None:
        """No block is kept whose parent had to go before it."""
        if not self.evicts or not self.has_limit:
            return
        prompts = [prompt("head", "left", "end"), prompt("head", "right"), prompt("other", "text")]
        with self.open(self.capacity_for(7)) as tier:
            for chunks in prompts:
                assert set(self.store_all(tier, chunks)) <= {PutOutcome.STORED, PutOutcome.PRESENT}
            tier.used(_keys(prompts[2]))  # makes the forked prompts the older ones
            for number in range(12):
                prompts.append(prompt(f"new {number}"))
                assert self.store_all(tier, prompts[-1]) == [PutOutcome.STORED]
                for chunks in prompts:
                    there = list(tier.contains(_keys(chunks)))
                    assert there == sorted(there, reverse=True), "a block was evicted before its successor"

    def test_making_room_never_evicts_the_parent(self) -> None:
        """A block that fits only in its parent's place is refused."""
        if not self.has_limit:
            return
        first, second = prompt("a", "b")
        with self.open(self.capacity_for(1)) as tier:
            assert self.store_all(tier, [first, second]) == [PutOutcome.STORED, PutOutcome.REFUSED]
            assert list(tier.contains(_keys([first, second]))) == [True, False], "the parent had to go"
            expected = PutOutcome.STORED if self.evicts else PutOutcome.REFUSED
            assert self.store_all(tier, prompt("x")) == [expected], "the parent can no longer be evicted"

    def test_used_is_no_lookup(self) -> None:
        """No counter moves, also for keys that are not there."""
        chunks = prompt("a", "b")
        with self.open() as tier:
            self.store_all(tier, chunks[:1])
            before = tier.stats()
            tier.used([])
            tier.used([*_keys(chunks), bytes(32)])
            assert tier.stats() == before, "used() changed the counters"
            assert list(tier.contains(_keys(chunks))) == [True, False], "used() changed what is stored"

    # Forgetting

    def test_what_was_removed_is_gone(self) -> None:
        """With its bytes, and it can be stored again. Removing what is not there is harmless."""
        chunks = prompt("a", "b")
        with self.open() as tier:
            self.store_all(tier, chunks)
            each = tier.stats().bytes // 2
            tier.remove([chunks[1].prefix_key, bytes(32)])
            assert list(tier.contains(_keys(chunks))) == [True, False], (
                "a removed block is there, or another one is gone"
            )
            assert list(tier.load([chunks[1].prefix_key])) == [None], "a removed block was loaded"
            if self.counts:
                assert (tier.stats().chunks, tier.stats().bytes) == (1, each), "a removed block is still counted"
            assert [list(found) for found in tier.variants([chunks[1].content_key])] == [[]], "found by its content"
            assert self.store_all(tier, chunks) == [PutOutcome.PRESENT, PutOutcome.STORED]

    def test_clear_forgets(self) -> None:
        """Everything, and the tier goes on as if new."""
        chunks = prompt("a", "b")
        with self.open(self.capacity_for(2)) as tier:
            self.store_all(tier, chunks)
            tier.clear()
            assert (tier.stats().chunks, tier.stats().bytes) == (0, 0)
            assert list(tier.load(_keys(chunks))) == [None, None], "a cleared tier still finds blocks"
            assert self.store_all(tier, chunks) == [PutOutcome.STORED] * 2, "a cleared tier refuses blocks"

    def test_flush_loses_nothing(self) -> None:
        """It may be called at any time, twice, and with nothing to do."""
        chunks = prompt("a", "b")
        with self.open() as tier:
            tier.flush()
            self.store_all(tier, chunks)
            tier.used(_keys(chunks))
            tier.flush()
            tier.flush()
            assert all(block is not None for block in tier.load(_keys(chunks)))

    # Others

    def test_others_see_nothing(self) -> None:
        """Neither another model nor another tenant finds, removes or clears what is not its own."""
        blocks = [block_of(chunk) for chunk in prompt("a", "b")]
        keys, contents = [b.key for b in blocks], [b.content_key for b in blocks]
        namespaces = (namespace("another model"), namespace(tenant="another tenant"))
        with self.open() as tier:
            if not tier.outlives_process:
                return
            for block in blocks:
                tier.store(block)
            for another in namespaces:
                with self.open(of=another) as other:
                    assert list(other.contains(keys)) == [False, False], "another namespace's contains() sees a block"
                    assert list(other.load(keys)) == [None, None], "another namespace loaded a block"
                    assert [list(found) for found in other.variants(contents)] == [[], []], "found by its content"
                    assert (other.stats().chunks, other.stats().bytes) == (0, 0), "another's blocks are counted"
                    other.used(keys)
                    other.remove(keys)
                    other.clear()
                    own = replace(blocks[0], tensors=(torch.zeros(3),), nbytes=12)
                    assert other.store(own) is PutOutcome.STORED, "the same key is free in another namespace"
                    assert_same(next(iter(other.load(keys[:1]))), own)
            for found, block in zip(tier.load(keys), blocks, strict=True):
                assert_same(found, block)

    def test_the_next_process_finds_what_this_one_stored(self) -> None:
        """And so does another one at the same time."""
        chunks = prompt("a", "b", "c")
        with self.open() as tier:
            if not tier.outlives_process:
                return
            self.store_all(tier, chunks[:2])
            with self.open() as other:
                assert list(other.contains(_keys(chunks))) == [True, True, False]
                for found, chunk in zip(other.load(_keys(chunks[:2])), chunks, strict=False):
                    assert_same(found, block_of(chunk))
                self.store_all(other, chunks[2:])
            assert_same(next(iter(tier.load(_keys(chunks[2:])))), block_of(chunks[2]))
            tier.flush()
            held = (tier.stats().chunks, tier.stats().bytes)
        with self.open() as tier:
            assert (tier.stats().chunks, tier.stats().bytes) == held == (3 if self.counts else 0, held[1])
            for found, chunk in zip(tier.load(_keys(chunks)), chunks, strict=True):
                assert_same(found, block_of(chunk))

    # Counting

    def test_the_counters_add_up(self) -> None:
        """Hits and misses are what was loaded; what was stored is there or was evicted."""
        chooser = random.Random(0)
        asked = hits = stored = refused = 0
        capacity = self.capacity_for(5)
        with self.open(capacity) as tier:
            for _ in range(60):
                chunks = prompt(*chooser.choices("abc", k=chooser.randint(1, 4)))
                asked += len(chunks)
                hits += sum(block is not None for block in tier.load(_keys(chunks)))
                outcomes = self.store_all(tier, chunks)
                tier.used(_keys(chunks))
                stored += outcomes.count(PutOutcome.STORED)
                refused += outcomes.count(PutOutcome.REFUSED)
                stats = tier.stats()
                self._within(stats, capacity)
                assert (stats.hits, stats.misses) == (hits, asked - hits), f"hits or misses miscounted: {stats}"
                assert (stats.refused, stats.rejected, stats.leased) == (refused, 0, 0), f"miscounted: {stats}"
                if self.counts:
                    assert stats.chunks == stored - stats.evictions, f"{stored} stored, but {stats}"

    def test_many_threads(self) -> None:
        """Eight at once: the budget holds at every moment, and nobody gets another block than he asked for."""
        capacity = self.capacity_for(12)
        prompts = [prompt(*words) for words in ("abcd", "abce", "abf", "axyz", "pqrs", "pqt", "uvw", "u")]
        failures: list[BaseException] = []
        start = threading.Barrier(8)

        def work(seed: int, tier: Tier) -> None:
            chooser = random.Random(seed)
            try:
                start.wait()
                for turn in range(15):
                    chunks = chooser.choice(prompts)
                    for found, chunk in zip(tier.load(_keys(chunks)), chunks, strict=True):
                        if found is not None:
                            assert_same(found, block_of(chunk))
                    self.store_all(tier, chunks)
                    tier.used(_keys(chunks))
                    self._within(tier.stats(), capacity)
                    if turn % 5 == 0:
                        tier.remove(_keys(chunks)[-1:])
                        tier.flush()
            except BaseException as error:  # noqa: BLE001 (a thread cannot raise into the test)
                failures.append(error)

        with self.open(capacity) as tier:
            workers = [threading.Thread(target=work, args=(seed, tier)) for seed in range(8)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            if failures:
                raise AssertionError(f"a thread failed: {failures[0]!r}") from failures[0]
            there = sum(tier.contains(sorted({key for chunks in prompts for key in _keys(chunks)})))
            if self.counts:
                assert tier.stats().chunks == there, f"{there} blocks there, but {tier.stats()}"

    def _within(self, stats: StoreStats, capacity: int) -> None:
        """The tier is within its budget, if it has one, and no counter is below zero."""
        if self.has_limit:
            held = f"{stats.bytes} bytes held, {capacity} allowed: {stats}"
            assert stats.bytes <= capacity == stats.capacity_bytes, held
        counters = (stats.chunks, stats.bytes, stats.hits, stats.misses, stats.evictions, stats.refused)
        assert min(counters) >= 0, f"a counter is below zero: {stats}"
