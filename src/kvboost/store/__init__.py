"""Where blocks are kept between requests."""

from kvboost.store.eviction import LeafFirstLRU
from kvboost.store.memory import MemoryStore

__all__ = ["LeafFirstLRU", "MemoryStore"]
