"""Who goes first when a store is full: the orders to choose from. Leaf first, all of them."""

from kvboost.store.policies.arc import AdaptiveReplacement
from kvboost.store.policies.expected import LeastExpected
from kvboost.store.policies.gdsf import GreedyDualSizeFrequency
from kvboost.store.policies.lru import LeafFirstLRU
from kvboost.store.policies.s3fifo import SmallMainGhostFIFO

__all__ = ["AdaptiveReplacement", "GreedyDualSizeFrequency", "LeafFirstLRU", "LeastExpected", "SmallMainGhostFIFO"]
