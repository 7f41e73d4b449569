"""Eviction policies: which block goes first when a store is full. Both evict leaves first."""

from kvboost.store.eviction.expected import LeastExpected
from kvboost.store.eviction.lru import LeafFirstLRU

__all__ = ["LeafFirstLRU", "LeastExpected"]
