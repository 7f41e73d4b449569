"""KV events in vLLM's wire format: what a store has gained and lost, as cache-aware routers read it.

:class:`StoreEvents` makes them from a store; docs/fleet.md says what they are worth to which router. Invariants: vLLM
0.32 decodes what is encoded here, and the other way round (``tests/integrations/vllm/test_events.py``); one chunk is
one block, named by its prefix key; KV that is not the exact beginning of a prompt is announced without its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from kvboost.types import TOKEN_BYTES, KVBlock

BlockHash = bytes | int
MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"
LOCAL = "LOCAL"
_TOKENS = np.dtype("<u4")


class KVEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Any of the events. Fields are vLLM's, unless said otherwise."""


class BlockStored(KVEvent):
    """Blocks that are held now, each the continuation of the one before it."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    content_hashes: list[bytes] | None = None
    """Not vLLM's, which ignores it: what names each block's tokens wherever they stand."""


class BlockRemoved(KVEvent):
    """Blocks that are held no more."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVEvent):
    """Nothing is held any more, in any medium."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one message."""

    ts: float
    """Seconds since the epoch."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


encode_batch = msgspec.msgpack.Encoder().encode
"""The payload of a message."""
decode_batch = msgspec.msgpack.Decoder(EventBatch).decode
"""The batch in a payload. Raises msgspec.DecodeError."""


class StoreEvents:
    """A :class:`kvboost.extend.StoreListener` that makes events of what it hears. Thread-safe."""

    def __init__(self, publish: Callable[[Sequence[KVEvent]], None], *, memory_medium: str = MEDIUM_CPU) -> None:
        """``publish`` must return at once; ``memory_medium`` says where the memory store's tensors lie."""
        self._publish = publish
        self._media = {"memory": memory_medium, "host": MEDIUM_CPU, "disk": MEDIUM_STORAGE}
        publish([AllBlocksCleared()])  # whoever knew this server before its restart

    def stored(self, tier: str, block: KVBlock) -> None:
        """``tier`` has this block now."""
        # Found by its content alone, or computed behind such KV: no prefix leads to it.
        is_prefix = block.approx_depth == 0 and (block.parent_key is not None or block.start == 0)
        event = BlockStored(
            block_hashes=[block.key],
            parent_block_hash=block.parent_key if is_prefix else None,
            token_ids=token_ids(block.tokens) if is_prefix else [],
            block_size=len(block.tokens) // TOKEN_BYTES if is_prefix else 0,
            lora_id=None,
            medium=self._media[tier],
            lora_name=None,
            locality=LOCAL,
            ownership=tier,
            content_hashes=[block.content_key],
        )
        self._publish([event])

    def removed(self, tier: str, keys: Sequence[bytes]) -> None:
        """``tier`` has these blocks no more."""
        self._publish([BlockRemoved([*keys], self._media[tier], locality=LOCAL, ownership=tier)])


def token_ids(tokens: bytes) -> list[int]:
    """The token ids of a chunk, which are little-endian uint32."""
    ids: list[int] = np.frombuffer(tokens, dtype=_TOKENS).tolist()
    return ids
