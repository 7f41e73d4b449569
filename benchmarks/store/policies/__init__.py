"""Known eviction policies to hold the wheel's own against. All of them evict leaves first."""

from benchmarks.store.policies.arc import AdaptiveReplacement
from benchmarks.store.policies.gdsf import GreedyDualSizeFrequency
from benchmarks.store.policies.s3fifo import SmallMainGhostFIFO

__all__ = ["AdaptiveReplacement", "GreedyDualSizeFrequency", "SmallMainGhostFIFO"]
