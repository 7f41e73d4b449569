"""The disk tier: its contract, several processes, killed writers, failing disks, broken indexes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost.extend import Tier
from kvboost.store.disk import DiskTier
from kvboost.store.record import RecordFormat
from kvboost.testing import TierContract
from kvboost.types import Namespace


class TestDiskTierContract(TierContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "cache"

    def make_tier(self, *, capacity_bytes: int, namespace: Namespace) -> Tier:
        return DiskTier(self.directory, capacity_bytes=capacity_bytes, records=RecordFormat(namespace))
