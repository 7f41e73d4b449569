"""Who goes first when a store is full: the orders to choose from. Leaf first, all of them."""

from kvboost.store.eviction.arc import AdaptiveReplacement
from kvboost.store.eviction.expected import LeastExpected
from kvboost.store.eviction.gdsf import GreedyDualSizeFrequency
from kvboost.store.eviction.lru import LeafFirstLRU
from kvboost.store.eviction.s3fifo import SmallMainGhostFIFO

__all__ = ["AdaptiveReplacement", "GreedyDualSizeFrequency", "LeafFirstLRU", "LeastExpected", "SmallMainGhostFIFO"]
