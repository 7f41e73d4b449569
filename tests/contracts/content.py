"""What every chunk store must do for chunks that are looked for by content alone.

Part of ``ChunkStoreContract``. Invariant: which of several fitting blocks is chosen is
tested only where their contexts differ clearly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from kvboost.core.keys import chunk_keys, variant_key
from kvboost.errors import StoreError
from kvboost.extend import ChunkStore
from kvboost.types import Chunk, KVBlock, PutOutcome, context_before

SIZE = 100  # bytes of a block where its size does not matter
_ROOT = hashlib.sha256(b"contracts").digest()


def prompt(*words: str, tenant: str = "") -> list[Chunk]:
    """A prompt with one chunk per word. A tenant's prompts that begin with the same words share those chunks."""
    ids = b"".join(hashlib.sha256(word.encode()).digest()[:16] for word in words)
    root = _ROOT if not tenant else hashlib.sha256(_ROOT + tenant.encode()).digest()
    return chunk_keys(root, np.frombuffer(ids, dtype="<u4"), range(4, 4 * len(words) + 1, 4), tenant=tenant)


class ContentRules:
    """The rules of ``lease_content``."""

    def make_store(self, *, capacity_bytes: int, max_chunks: int | None = None) -> ChunkStore:
        """A new, empty store with these limits. The suite closes it."""
        raise NotImplementedError("return the store under test")

    def make_block(self, chunk: Chunk, nbytes: int = SIZE) -> KVBlock:
        """The block of ``chunk``, of ``nbytes`` bytes."""
        return KVBlock(
            key=chunk.prefix_key,
            parent_key=chunk.parent_key,
            content_key=chunk.content_key,
            tokens=chunk.tokens,
            tensors=(),
            nbytes=nbytes,
            bitwise=True,
            start=chunk.start,
        )

    def put_prompt(self, store: ChunkStore, chunks: Sequence[Chunk]) -> list[PutOutcome]:
        """Store a prompt's chunks with their contexts, first chunk first."""
        return [
            store.put(replace(self.make_block(chunk), context=context_before(chunks, index)))
            for index, chunk in enumerate(chunks)
        ]

    def variant(self, chunks: Sequence[Chunk]) -> KVBlock:
        """The last of ``chunks`` as if computed behind repositioned ones."""
        context = context_before(chunks, len(chunks) - 1)
        key = variant_key(chunks[-1].content_key, context)
        block = self.make_block(chunks[-1])
        return replace(block, key=key, parent_key=None, bitwise=False, context=context, approx_depth=1)

    def test_content_is_found_wherever_it_stands(self) -> None:
        """After gaps, in another order, several times; None for what is not there."""
        with closing(self.make_store(capacity_bytes=10_000)) as store:
            self.put_prompt(store, prompt("a", "b", "c"))
            wanted = prompt("x", "c", "y", "a", "c")
            with store.lease_content(wanted, after=1) as lease:
                found = [None if block is None else block.tokens for block in lease.blocks]
                starts = [None if block is None else block.start for block in lease.blocks]
            assert found == [wanted[1].tokens, None, wanted[3].tokens, wanted[4].tokens], "a chunk was not found"
            assert starts == [8, None, 0, 8], "a block forgot where it was computed"
            assert store.stats().content_hits == 3
            with store.lease_content(wanted, after=len(wanted)) as lease:
                assert list(lease.blocks) == []

    def test_other_tokens_under_the_same_content_key_are_a_miss(self) -> None:
        """Keys may collide, or be forged; tokens decide."""
        with closing(self.make_store(capacity_bytes=1000)) as store:
            chunk = prompt("a")[0]
            store.put(replace(self.make_block(chunk), tokens=b"\x01" * 16))
            with store.lease_content([chunk], after=0) as lease:
                assert list(lease.blocks) == [None], "a block with other tokens was handed out"
            assert store.stats().rejected >= 1

    def test_the_variant_with_most_of_the_same_context_is_chosen(self) -> None:
        """Its keys and values are nearest to right."""
        with closing(self.make_store(capacity_bytes=10_000)) as store:
            for words in (("a", "b", "z"), ("c", "d", "z"), ("z",)):
                self.put_prompt(store, prompt(*words))
            for before in (("a", "b"), ("b", "q", "a"), ("d",), ("c", "q")):
                wanted = prompt(*before, "z")
                with store.lease_content(wanted, after=len(before)) as lease:
                    block = lease.blocks[0]
                    assert block is not None
                    expected = prompt(*(("a", "b") if before[0] in "ab" else ("c", "d")), "z")[-1]
                    assert block.key == expected.prefix_key, f"behind {before} another variant fits better"

    def test_variants_are_moved_but_never_exact(self) -> None:
        """What was computed behind repositioned chunks is no prefix of anything."""
        with closing(self.make_store(capacity_bytes=10_000)) as store:
            chunks = prompt("a", "b")
            assert store.put(self.variant(chunks)) is PutOutcome.STORED
            assert store.put(self.variant(chunks)) is PutOutcome.PRESENT
            for words in (("b",), ("a", "b")):
                with store.lease(prompt(*words)) as exact:
                    assert list(exact.blocks) == [], "a variant was handed out as exact"
            with store.lease_content(prompt("q", "b"), after=1) as lease:
                assert [block is not None and block.approx_depth for block in lease.blocks] == [1]

    def test_the_same_content_is_kept_only_a_few_times(self) -> None:
        """Variants cost bytes; exact blocks are never refused for it."""
        with closing(self.make_store(capacity_bytes=100_000)) as store:
            outcomes = [store.put(self.variant(prompt(f"w{i}", "z"))) for i in range(50)]
            assert outcomes[0] is PutOutcome.STORED
            assert outcomes[-1] is PutOutcome.REFUSED, "fifty variants of one chunk were kept"
            assert set(self.put_prompt(store, prompt("other", "z"))) == {PutOutcome.STORED}

    def test_content_leases_hold_their_blocks(self) -> None:
        """Until released, twice without harm; then they may go."""
        with closing(self.make_store(capacity_bytes=2 * SIZE)) as store:
            chunks = prompt("a")
            self.put_prompt(store, chunks)
            lease = store.lease_content(prompt("q", "a"), after=1)
            self.put_prompt(store, prompt("b"))
            self.put_prompt(store, prompt("c"))
            with store.lease(chunks) as exact:
                assert len(exact.blocks) == 1, "a leased block was evicted"
            assert store.stats().leased == 1
            lease.release()
            lease.release()
            try:
                _ = lease.blocks
            except StoreError:
                pass  # as it must
            else:
                raise AssertionError("a released lease still hands out blocks")
            assert store.stats().leased == 0

    def test_what_is_gone_is_not_found_by_content(self) -> None:
        """Neither after an eviction nor after a clear."""
        with closing(self.make_store(capacity_bytes=2 * SIZE)) as store:
            for word in "abc":
                self.put_prompt(store, prompt(word))
            wanted = prompt("q", "a", "b", "c")
            with store.lease_content(wanted, after=1) as lease:
                assert sum(block is not None for block in lease.blocks) == 2, "an evicted block was found"
            store.clear()
            with store.lease_content(wanted, after=1) as lease:
                assert list(lease.blocks) == [None] * 3, "a cleared block was found"
