"""Blocks in host memory, below a memory store whose tensors lie on an accelerator.

Made by the engine for ``host_cache_bytes``; used as a :class:`kvboost.extend.Tier`. It ends with the process, so it
is filled by what is evicted from the accelerator's memory. Invariants: the bytes held, those being copied included,
never exceed the capacity; a block with stored successors is not evicted, whether its own parent is here or not, as
leaves come down first.

Where there is an accelerator the copies lie in pinned memory, which it reads without another copy. Pinned copies were
not run on an accelerator here: the tests run this tier on the CPU, pinning nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kvboost.extend import EvictionPolicy
from kvboost.store.counters import ContentKeys, Counters
from kvboost.store.eviction import LeafFirstLRU
from kvboost.store.tiers.base import MAX_VARIANTS, info_of
from kvboost.types import BlockInfo, KVBlock, PutOutcome, StoreStats


class HostTier:
    """Blocks in host memory, at most ``capacity_bytes`` of them."""

    name = "host"
    outlives_process = False

    def __init__(
        self, capacity_bytes: int, *, pinned: bool | None = None, policy: EvictionPolicy | None = None
    ) -> None:
        """``pinned``: whether copies are pinned; by default where there is an accelerator."""
        self._capacity = capacity_bytes
        self._pinned = torch.accelerator.is_available() if pinned is None else pinned
        self._policy = policy if policy is not None else LeafFirstLRU()
        self._lock = threading.Lock()
        self._blocks: dict[bytes, KVBlock] = {}
        self._copying: set[bytes] = set()  # capacity is reserved, the tensors are being copied
        self._successors: Counter[bytes] = Counter()  # of stored and coming blocks, by their parent's key
        self._contents = ContentKeys()
        self._bytes = 0
        self._counters = Counters()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these are here."""
        with self._lock:
            return [key in self._blocks for key in keys]

    def variants(self, content_keys: Sequence[bytes]) -> list[list[BlockInfo]]:
        """For each content, the newest blocks that hold it, newest last."""
        with self._lock:
            newest = [self._contents.of(content)[-MAX_VARIANTS:] for content in content_keys]
            return [[info_of(self._blocks[key]) for key in keys] for keys in newest]

    def load(self, keys: Sequence[bytes]) -> Iterator[KVBlock | None]:
        """The blocks under these keys, in this order. Their tensors are this tier's own and lie in host memory."""
        for key in keys:
            with self._lock:
                block = self._blocks.get(key)
                self._counters.looked_up(found=block is not None)
            yield block

    def store(self, block: KVBlock) -> PutOutcome:
        """Copy ``block`` to host memory; others are evicted for it, leaves first and least recently used first."""
        with self._lock:
            if block.key in self._blocks:
                return PutOutcome.PRESENT
            if block.key in self._copying or not self._reserve(block):
                self._counters.refused += 1
                return PutOutcome.REFUSED
            self._copying.add(block.key)
        kept: KVBlock | None = None
        try:
            kept = replace(block, tensors=tuple(self._on_host(tensor) for tensor in block.tensors))
        finally:
            with self._lock:
                self._copying.discard(block.key)
                if kept is None:
                    self._uncount(block)
                else:
                    self._blocks[block.key] = kept
                    self._contents.add(block.content_key, block.key)
                    self._policy.inserted(
                        block.key, parent=block.parent_key, nbytes=block.nbytes, content=block.content_key
                    )
        return PutOutcome.STORED

    def used(self, chain: Sequence[bytes]) -> None:
        """The keys of one prompt were used: each becomes more recent than its successors."""
        with self._lock:
            self._policy.used([key for key in chain if key in self._blocks])

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these blocks."""
        with self._lock:
            for key in keys:
                if key in self._blocks:
                    self._drop(key)

    def flush(self) -> None:
        """Nothing to do: what was stored is here until the process ends."""

    def clear(self) -> None:
        """Forget every block."""
        with self._lock:
            for key in list(self._blocks):
                self._drop(key)

    def stats(self) -> StoreStats:
        """Counters and sizes, consistent with each other."""
        with self._lock:
            return self._counters.stats(
                self.name, chunks=len(self._blocks), nbytes=self._bytes, capacity_bytes=self._capacity
            )

    def close(self) -> None:
        """Forget every block."""
        self.clear()

    def _reserve(self, block: KVBlock) -> bool:
        """Evict others until ``block`` fits, and count it; False if it cannot. The lock is held."""
        if block.nbytes > self._capacity:
            return False
        self._bytes += block.nbytes
        if block.parent_key is not None:
            self._successors[block.parent_key] += 1  # before evicting: the parent must not be the victim
        while self._bytes > self._capacity:
            victim = self._policy.victim(self._is_leaf)
            if victim is None:
                self._uncount(block)
                return False
            self._drop(victim)
            self._counters.evictions += 1
        return True

    def _is_leaf(self, key: bytes) -> bool:
        return key not in self._successors

    def _drop(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        self._policy.removed(key)
        self._uncount(block)
        self._contents.remove(block.content_key, key)

    def _uncount(self, block: KVBlock) -> None:
        self._bytes -= block.nbytes
        if block.parent_key is not None:
            self._successors[block.parent_key] -= 1
            if not self._successors[block.parent_key]:
                del self._successors[block.parent_key]

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values in host memory; itself if it lies there already, as blocks are never written to."""
        if not self._pinned:
            return tensor.cpu()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor)
