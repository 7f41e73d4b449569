"""Eviction policies: which block goes first when a store is full. All of them evict leaves first."""

from kvboost.store.eviction.arc import AdaptiveReplacement
from kvboost.store.eviction.expected import LeastExpected
from kvboost.store.eviction.gdsf import GreedyDualSizeFrequency
from kvboost.store.eviction.lru import LeafFirstLRU
from kvboost.store.eviction.s3fifo import SmallMainGhostFIFO

__all__ = ["AdaptiveReplacement", "GreedyDualSizeFrequency", "LeafFirstLRU", "LeastExpected", "SmallMainGhostFIFO"]
