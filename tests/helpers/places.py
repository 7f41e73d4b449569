"""A place of chunk records of each kind, filled by its own tier and damaged behind its back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost.store import DiskTier, RedisTier
from kvboost.store.admin import open_catalogue
from kvboost.store.record.format import RecordFormat
from kvboost.store.tiers.disk.files import Layout
from kvboost.types import KVBlock, Namespace, PutOutcome, tenant_digest
from tests.contracts.blocks import block_of, namespace
from tests.contracts.content import prompt

KINDS = ("disk", "redis")


def of(model: str, tenant: str = "") -> Namespace:
    """A namespace as an engine of this tenant has it."""
    return Namespace(namespace(model).root, tenant_digest(tenant))


def blocks_of(*words: str, nbytes: int = 1000) -> list[KVBlock]:
    """The blocks of a prompt."""
    return [block_of(chunk, nbytes) for chunk in prompt(*words)]


@dataclass
class Place:
    """One place, by its name on the command line."""

    kind: str
    url: str

    def tier(self, records: RecordFormat) -> Any:
        if self.kind == "disk":
            return DiskTier(self.url, capacity_bytes=2**30, records=records)
        return RedisTier(self.url, records=records, timeout_s=30.0)

    def fill(self, records: RecordFormat, blocks: Sequence[KVBlock]) -> None:
        tier = self.tier(records)
        assert {tier.store(block) for block in blocks} == {PutOutcome.STORED}
        tier.close()

    def change(self, records: RecordFormat, key: bytes, *, at: int = -1) -> None:
        """Flip a bit of a record."""
        raw = bytearray(self._raw(records, key))
        raw[at] ^= 1
        self.put(records, key, bytes(raw))

    def put(self, records: RecordFormat, key: bytes, raw: bytes) -> None:
        """Put these bytes under a record's name."""
        tenant, space = records.namespace.tenant.hex(), records.space.hex()
        if self.kind == "disk":
            path = Layout(Path(self.url)).record(records.space, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        else:
            import redis

            with redis.Redis.from_url(self.url) as client:
                client.set(f"kvboost:2:{tenant}:{space}:{key.hex()}", raw)

    def _raw(self, records: RecordFormat, key: bytes) -> bytes:
        catalogue = open_catalogue(self.url)
        try:
            entries = [e for e in catalogue.entries() if e.key == key and e.space == records.space]
            ((_, record),) = catalogue.records(entries)
        finally:
            catalogue.close()
        assert record is not None
        return bytes(record)
