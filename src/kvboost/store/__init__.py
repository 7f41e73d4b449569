"""Where blocks are kept between requests."""

from kvboost.store.eviction import LeafFirstLRU, LeastExpected
from kvboost.store.lookup import LoadRules
from kvboost.store.memory import MemoryStore
from kvboost.store.record.format import RecordFormat, key_salt, read_key, record_format
from kvboost.store.tiered import TieredStore
from kvboost.store.tiers.disk.directory import check_directory
from kvboost.store.tiers.disk.tier import DiskTier
from kvboost.store.tiers.host import HostTier
from kvboost.store.tiers.redis.tier import RedisTier

__all__ = [
    "DiskTier",
    "HostTier",
    "LeafFirstLRU",
    "LeastExpected",
    "LoadRules",
    "MemoryStore",
    "RecordFormat",
    "RedisTier",
    "TieredStore",
    "check_directory",
    "key_salt",
    "read_key",
    "record_format",
]
