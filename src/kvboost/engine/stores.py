"""The configured store, memory and the tiers below it, and each tenant's share of it.

Made once when an engine is assembled. Invariants: a tier returns only blocks written for this model, this tenant and
these settings; all tenants together stay within the limits of memory and directory (a shared server's is its own),
and share one store, its connections and its threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch

from kvboost.config import EngineConfig
from kvboost.core.costs import CostModel
from kvboost.errors import EXTRAS, ConfigError, StoreError, with_extra
from kvboost.extend import Tier
from kvboost.hf.cache import KVLayout
from kvboost.hf.codec import KVCodec
from kvboost.hf.streams import streams_for
from kvboost.store import (
    DiskTier,
    HostTier,
    LoadRules,
    MemoryStore,
    RecordFormat,
    RedisTier,
    TieredStore,
    read_key,
    record_format,
)
from kvboost.store.tiers.disk.files import Files
from kvboost.store.uploads import Uploads
from kvboost.types import TOKEN_BYTES, KVBlock, Namespace, tenant_digest

_RECORD_BYTES = 64 * 2**20
_MAX_CHUNK_FACTOR = 16  # times the average chunk, per record: chunks vary in length
_QUEUE_SHARE = 4  # of cache_bytes: a quarter may wait to be written to the tiers below
_MAX_QUEUE_BYTES = 512 * 2**20
_PAGES_PER_CHUNK = 16  # of the host tier: half a page of each record is empty on average
_PAGE_BYTES = (2**16, 2**21)  # at least and at most: copies of less are bound by how many there are

LastingTier = DiskTier | RedisTier

_Like = tuple[torch.Size, torch.dtype, torch.device]

OwnStore = MemoryStore | TieredStore


class Stores:
    """Makes the engine's store with the first tenant, and opens it for the others."""

    def __init__(
        self, config: EngineConfig, *, layout: KVLayout, codec: KVCodec, costs: CostModel, repaired_share: float
    ) -> None:
        """Opens nothing yet. ``repaired_share`` of repositioned tokens will be recomputed.

        Raises ConfigError for a key that cannot be used.
        """
        self._reposition_saves = max(0.0, 1.0 - repaired_share)
        self._config, self._layout, self._codec, self._costs = config, layout, codec, costs
        self._key = read_key(config.record_key_file) if config.record_key_file is not None else None
        self._packed_like = _packed_like(codec, layout)
        devices = {spec.device for spec in layout.slots}
        on_cpu = all(device.type == "cpu" for device in devices)
        if config.host_cache_bytes and on_cpu:
            raise ConfigError(
                f"host_cache_bytes={config.host_cache_bytes} needs a model on an accelerator; on the CPU the memory "
                "cache is in host memory already: raise cache_bytes instead"
            )
        self._streams = streams_for(devices)
        self._uploads = None if on_cpu else Uploads(self._streams, devices=self._devices_of)
        self._lock = threading.Lock()
        self._tiers: list[LastingTier] = []
        self._store: OwnStore | None = None

    def open(self, tenant: str, *, root: bytes) -> OwnStore:
        """The store, with what this tenant has there. ``root`` names the model and settings its records belong to."""
        records = self._records(Namespace(root, tenant_digest(tenant)))
        with self._lock:
            if self._store is None:
                self._store = self._make(records)
            elif isinstance(self._store, TieredStore):
                self._store.open(tenant, [tier.for_namespace(records) for tier in self._tiers])
            else:
                self._store.open(tenant)
            return self._store

    def _make(self, records: RecordFormat) -> OwnStore:
        config, quota = self._config, _limit(self._config.tenant_bytes)
        self._tiers = self._first_tiers(records, quota)
        # The engine's own tenant only: a host tier cannot tell evicted blocks of different tenants apart.
        tiers: Sequence[Tier] = [*self._host_tiers(), *self._tiers]
        # What waits to be written may have left the memory, so it has a share of the same budget.
        queue_bytes = min(_MAX_QUEUE_BYTES, int(config.cache_bytes) // _QUEUE_SHARE) if tiers else 0
        memory = MemoryStore(
            int(config.cache_bytes) - queue_bytes,
            max_chunks=config.max_chunks,
            quota_bytes=quota,
            owner=config.tenant,
            states_alone=self._layout.counts,
        )
        if not tiers:
            return memory
        rules = LoadRules(
            compute_seconds=self._compute_seconds,
            fits=self._fits,
            to_memory=self._uploads.upload if self._uploads is not None else iter,
            content_saves=self._reposition_saves,
        )
        return TieredStore(memory, tiers, rules=rules, streams=self._streams, waiting_bytes=queue_bytes)

    def health(self) -> dict[str, tuple[bool, int]]:
        """For each tier that outlives the process, whether it answers, and how many failures it has swallowed.

        All tenants share them. Asks no tier.
        """
        with self._lock:
            return {tier.name: (tier.is_available, sum(tier.health().values())) for tier in self._tiers}

    def purge(self, tenant: str | None) -> None:
        """Remove all blocks of a tenant, or of all, of any model, from every tier below the memory.

        Raises StoreError if a tier failed: unlike a lookup, this must not fail silently.
        """
        failed = []
        for tier in self._tiers:
            before = tier.health()
            tier.purge(None if tenant is None else tenant_digest(tenant))
            if tier.health() != before or not tier.is_available:
                failed.append(tier.name)
        if failed:
            raise StoreError(f"not everything could be removed from {', '.join(failed)}; purge it again later")

    def _records(self, namespace: Namespace) -> RecordFormat:
        config = self._config
        longest = _MAX_CHUNK_FACTOR * config.chunk_tokens * self._layout.bytes_per_token
        return record_format(
            namespace,
            codec=self._codec.name,
            max_bytes=max(_RECORD_BYTES, longest, 2 * self._layout.state_bytes),
            protection=config.record_protection,
            key=self._key,
        )

    def _host_tiers(self) -> list[HostTier]:
        capacity = int(self._config.host_cache_bytes)
        if not capacity:
            return []
        least, most = _PAGE_BYTES
        chunk = self._config.chunk_tokens * self._layout.bytes_per_token
        page = min(max(chunk // _PAGES_PER_CHUNK, least), most)
        return [HostTier(capacity, page_bytes=page, streams=self._streams)]

    def _first_tiers(self, records: RecordFormat, quota: int | None) -> list[LastingTier]:
        config = self._config
        tiers: list[LastingTier] = []
        if config.disk_cache_dir is not None:
            limit = _limit(config.disk_cache_bytes)
            folder, files = config.disk_cache_dir, Files(memory=self._uploads.memory) if self._uploads else None
            tiers.append(DiskTier(folder, capacity_bytes=limit, records=records, tenant_quota_bytes=quota, files=files))
        if config.remote_url is not None:
            tiers.append(
                RedisTier(
                    config.remote_url,
                    records=records,
                    ttl_seconds=config.remote_ttl_seconds,
                    timeout_s=config.remote_timeout_seconds,
                )
            )
        return tiers

    def _fits(self, block: KVBlock) -> bool:
        wanted = [(shape, dtype) for shape, dtype, _ in self._packed_like(block)]
        return bool(wanted) and [(tensor.shape, tensor.dtype) for tensor in block.tensors] == wanted

    def _devices_of(self, block: KVBlock) -> list[torch.device] | None:
        """Where the tensors of a block from a file or a server belong; the host tier has put its own there."""
        if any(tensor.device.type != "cpu" for tensor in block.tensors) or not self._fits(block):
            return None
        return [device for _, _, device in self._packed_like(block)]

    def _compute_seconds(self, tokens: int) -> float:
        if not self._costs.in_seconds:
            return math.inf  # no observation yet: try loading
        return self._costs.prefill_seconds(forwards=1, tokens=tokens)


def need_packages(config: EngineConfig) -> None:
    """Raises ConfigError for a setting whose extra is not installed."""
    needed: dict[str, str] = {}
    if config.remote_url is not None:
        needed["remote_url"] = "mooncake" if config.remote_url.startswith("mooncake:") else "redis"
    if config.record_protection == "encrypt":
        needed["record_protection"] = "crypto"
    for setting, extra in needed.items():
        for package in EXTRAS[extra]:
            if find_spec(package) is None:
                raise ConfigError(f"{setting} needs the package {package}; {with_extra(extra)}")


def _limit(setting: int | str | None) -> int | None:
    return None if setting is None else int(setting)


def _packed_like(codec: KVCodec, layout: KVLayout) -> Callable[[KVBlock], Sequence[_Like]]:
    """What the tensors of a block must be, so that it can be placed: as this codec packs one on the model's devices."""

    @lru_cache(maxsize=1024)
    def packed_like(tokens: int, start: int) -> list[_Like]:
        empty = [
            torch.zeros(len(slots), spec.heads, tokens, spec.dim, dtype=spec.dtype, device=spec.device)
            for spec, slots in layout.groups.items()
        ]
        return [(tensor.shape, tensor.dtype, tensor.device) for tensor in codec.pack(empty, start=start)]

    states = [(torch.Size(spec.shape), spec.dtype, spec.device) for spec in layout.states]
    # A codec may depend on the position only in whether it is 0.
    return lambda block: packed_like(len(block.tokens) // TOKEN_BYTES, min(block.start, 1)) if block.tokens else states
