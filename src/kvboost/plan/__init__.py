"""What can be reused, decided without torch: chunking, keys, and the plan of a request."""

from kvboost.plan.chunking import ContentChunker, FixedChunker, make_chunker
from kvboost.plan.hashing import chunk_keys, fingerprint_root, paged_key, token_array, variant_key
from kvboost.plan.planner import plan_reuse, reusable_chunks

__all__ = [
    "ContentChunker",
    "FixedChunker",
    "chunk_keys",
    "fingerprint_root",
    "make_chunker",
    "paged_key",
    "plan_reuse",
    "reusable_chunks",
    "token_array",
    "variant_key",
]
