"""Eviction policies: which block goes first when a store is full. Both evict leaves first."""

from kvboost.errors import ConfigError
from kvboost.extend import EvictionPolicy
from kvboost.store.eviction.expected import LeastExpected
from kvboost.store.eviction.lru import LeafFirstLRU

__all__ = ["LeafFirstLRU", "LeastExpected", "checked_policy"]


def checked_policy(policy: EvictionPolicy | None) -> EvictionPolicy:
    """``policy``, or the default one. Raises ConfigError for what is no policy."""
    if policy is None:
        return LeastExpected()
    if isinstance(policy, type):
        raise ConfigError(f"policy is a class; give an object of it: {policy.__name__}()")
    members = [name for name in vars(EvictionPolicy) if not name.startswith("_")]
    if missing := [name for name in members if not hasattr(policy, name)]:
        raise ConfigError(f"policy={policy!r} has no {', '.join(missing)}; give an object with all of EvictionPolicy's")
    return policy
