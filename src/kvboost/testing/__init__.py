"""Conformance suites that certify an extension: a store, a tier, a chunker, an eviction policy.

Subclass one in a pytest file, make the thing under test, and every rule of its Protocol is checked::

    from kvboost.testing import ChunkStoreContract

    class TestMyStore(ChunkStoreContract):
        def make_store(self, *, capacity_bytes, max_chunks=None):
            return MyStore(capacity_bytes, max_chunks)

The suites need no test library: each rule is a method that raises AssertionError where it is broken.
"""

from kvboost.testing.chunker import ChunkerContract
from kvboost.testing.link import SimulatedLink, SimulatedStreams
from kvboost.testing.policy import EvictionPolicyContract
from kvboost.testing.store import ChunkStoreContract
from kvboost.testing.tier import TierContract

__all__ = [
    "ChunkStoreContract",
    "ChunkerContract",
    "EvictionPolicyContract",
    "SimulatedLink",
    "SimulatedStreams",
    "TierContract",
]
