"""Opens the store that the settings ask for: memory, and the tiers below it.

Called once when an engine is assembled. Invariant: what a tier hands up was written for this model, this tenant and
these settings.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache

import torch

from kvboost.config import EngineConfig
from kvboost.engine.costs import CostModel
from kvboost.errors import ConfigError
from kvboost.extend import ChunkStore, Tier
from kvboost.model import KVCodec, KVLayout
from kvboost.store import DiskTier, HostTier, MemoryStore, RecordFormat, RedisTier, TieredStore
from kvboost.types import TOKEN_BYTES, KVBlock, Namespace

_RECORD_BYTES = 64 * 2**20
_LONGEST_CHUNKS = 16  # times the average that a record may hold: chunks vary in length


def open_store(config: EngineConfig, *, root: bytes, layout: KVLayout, codec: KVCodec, costs: CostModel) -> ChunkStore:
    """The engine's own store. ``root`` names the model and the settings that its keys descend from."""
    memory = MemoryStore(int(config.cache_bytes), max_chunks=config.max_chunks)
    tiers: list[Tier] = []
    tenant = hashlib.sha256(b"kvboost.tenant.1" + config.tenant.encode()).digest()
    longest = _LONGEST_CHUNKS * config.chunk_size * layout.bytes_per_token
    records = RecordFormat(Namespace(root, tenant), codec=codec.name, max_bytes=max(_RECORD_BYTES, longest))
    devices = {spec.device for spec in layout.slots}
    if config.host_cache_bytes:
        if all(device.type == "cpu" for device in devices):
            raise ConfigError(
                f"host_cache_bytes={config.host_cache_bytes} needs a model on an accelerator; on the CPU the memory "
                "cache lies in host memory already: give cache_bytes more instead"
            )
        tiers.append(HostTier(int(config.host_cache_bytes)))
    if config.disk_cache_dir is not None:
        tiers.append(DiskTier(config.disk_cache_dir, capacity_bytes=int(config.disk_cache_bytes), records=records))
    if config.remote_url is not None:
        ttl = config.remote_ttl_seconds
        capacity = int(config.remote_cache_bytes)
        tiers.append(RedisTier(config.remote_url, capacity_bytes=capacity, records=records, ttl_seconds=ttl))
    if not tiers:
        return memory

    def compute_seconds(tokens: int) -> float:
        if not costs.in_seconds:
            return math.inf  # nothing is known yet: loading is tried
        return costs.read_seconds(forwards=tokens / config.chunk_size, rows=tokens)

    return TieredStore(
        memory, tiers, compute_seconds=compute_seconds, fits=_fitting(codec, layout), to_memory=_brought_to(devices)
    )


def _brought_to(devices: Collection[torch.device]) -> Callable[[KVBlock], KVBlock]:
    """Brings a block to the model's device, so that it is copied there once and not for every request.

    A model spread over several takes it from the host.
    """
    if len(devices) != 1 or all(device.type == "cpu" for device in devices):
        return lambda block: block
    (device,) = devices

    def bring(block: KVBlock) -> KVBlock:
        return replace(block, tensors=tuple(tensor.to(device, non_blocking=True) for tensor in block.tensors))

    return bring


def _fitting(codec: KVCodec, layout: KVLayout) -> Callable[[KVBlock], bool]:
    """Tells whether a block that came from elsewhere is made of what this codec packs, so that it can be placed."""

    @lru_cache(maxsize=1024)
    def packed_like(rows: int, start: int) -> list[tuple[torch.Size, torch.dtype]]:
        empty = [
            torch.zeros(len(slots), spec.heads, rows, spec.dim, dtype=spec.dtype)
            for spec, slots in layout.groups.items()
        ]
        return [(tensor.shape, tensor.dtype) for tensor in codec.pack(empty, start=start)]

    def fits(block: KVBlock) -> bool:
        # Whether a block begins its text is all that a codec may ask of where it stood.
        wanted = packed_like(len(block.tokens) // TOKEN_BYTES, min(block.start, 1))
        return [(tensor.shape, tensor.dtype) for tensor in block.tensors] == wanted

    return fits
