"""The engine: plan, lease, place, forward, decode, commit."""

from kvboost.engine.engine import KVBoost

__all__ = ["KVBoost"]
