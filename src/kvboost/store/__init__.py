"""Where blocks are kept between requests."""

from kvboost.store.eviction import LeafFirstLRU
from kvboost.store.memory import MemoryStore
from kvboost.store.variants import context_before, context_mark

__all__ = ["LeafFirstLRU", "MemoryStore", "context_before", "context_mark"]
