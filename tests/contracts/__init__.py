"""Conformance suites that certify an extension: a store, a tier, a chunker, an eviction policy.

Copy this folder into your tests. Subclass a suite in a pytest file, make the thing under test, and every rule of its
Protocol is checked::

    from tests.contracts import ChunkStoreContract

    class TestMyStore(ChunkStoreContract):
        def make_store(self, *, capacity_bytes, max_chunks=None):
            return MyStore(capacity_bytes, max_chunks)

The suites need no test library: each rule is a method that raises AssertionError where it is broken.
"""

from .chunker import ChunkerContract
from .policy import EvictionPolicyContract
from .store import ChunkStoreContract
from .tier import TierContract

__all__ = [
    "ChunkStoreContract",
    "ChunkerContract",
    "EvictionPolicyContract",
    "TierContract",
]
