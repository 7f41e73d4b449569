"""Where blocks are kept between requests."""

from kvboost.store.disk import DiskTier
from kvboost.store.host import HostTier
from kvboost.store.memory import MemoryStore
from kvboost.store.objects import ObjectTier
from kvboost.store.policies import (
    AdaptiveReplacement,
    GreedyDualSizeFrequency,
    LeafFirstLRU,
    LeastExpected,
    SmallMainGhostFIFO,
)
from kvboost.store.protection import read_key, record_format
from kvboost.store.record import RecordFormat
from kvboost.store.redis import RedisTier
from kvboost.store.tiered import TieredStore
from kvboost.store.variants import context_before, context_mark

__all__ = [
    "AdaptiveReplacement",
    "DiskTier",
    "GreedyDualSizeFrequency",
    "HostTier",
    "LeafFirstLRU",
    "LeastExpected",
    "MemoryStore",
    "ObjectTier",
    "RecordFormat",
    "RedisTier",
    "SmallMainGhostFIFO",
    "TieredStore",
    "context_before",
    "context_mark",
    "read_key",
    "record_format",
]
