"""``kvboost bench`` without its command line: what is stored and reused, and what fails it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvboost.bench.compare import compare
from kvboost.bench.report import BenchError
from kvboost.hf.cache import SlabCache
from tests.helpers.serving import tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("bench") / "tiny-llama"))


def test_cold_reuses_nothing_warm_the_document_and_both_have_the_same_bits(model: str) -> None:
    report = compare(model, tokens=300, repeat=2, dtype="float32")
    speed, exact = report.tables
    assert [row[1] for row in speed.rows] == ["0", "0", "300"]
    assert [len(samples) for samples in report.raw["ttft_ms"].values()] == [2, 2, 2]
    assert exact.rows[0][1:] == ["2", "2"]
    assert speed.machine.model == "tiny-llama"
    assert not report.failed


def test_wrong_bits_fail_the_report(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = SlabCache.place

    def slightly_off(self: SlabCache, start: int, tensors: Sequence[Any], *, row: int = 0) -> None:
        place(self, start, [tensor * 1.001 for tensor in tensors], row=row)

    monkeypatch.setattr(SlabCache, "place", slightly_off)
    assert compare(model, tokens=300, repeat=1, dtype="float32").failed


def test_a_document_that_is_too_short_is_refused(model: str) -> None:
    with pytest.raises(BenchError, match="give 64 or more"):
        compare(model, tokens=10)


def test_text_of_ones_own_is_used(model: str, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(BenchError, match="give longer files"):
        compare(model, texts=[short], tokens=300, dtype="float32")
