"""Random use by many threads: no ledger is ever over its limit, no lease leaks. More: the benchmark capacity_limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost.store import MemoryStore
from kvboost.store.held import Entry
from tests.helpers import workload


def test_no_ledger_is_ever_over_its_limit(tmp_path: Path) -> None:
    seen = workload.run(2400, threads=8, directory=tmp_path / "cache")
    assert (seen.over, seen.wrong) == ([], [])
    assert seen.operations == 2400
    assert min(seen.looks[ledger] for ledger in ("memory", "waiting to be written", "disk", "disk, one tenant")) > 10
    assert seen.blocks_seen > 50
    assert seen.evictions > 100
    assert seen.most["memory"] > 0.8 * workload.MEMORY, "nothing was ever full"


def test_the_watch_sees_a_store_that_takes_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "_evict_for", lambda self, block, share: True)
    seen = workload.run(400, threads=2, directory=tmp_path / "cache")
    assert any(found.startswith("memory:") for found in seen.over)


def test_the_watch_sees_a_lease_that_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: MemoryStore, entries: list[Entry]) -> None:
        for entry in entries:
            entry.share.leased -= 1

    monkeypatch.setattr(MemoryStore, "_release", forgetful)
    seen = workload.run(400, threads=2, directory=tmp_path / "cache")
    assert any("leaked" in found for found in seen.wrong)
