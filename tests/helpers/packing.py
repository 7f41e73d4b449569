"""Packed weights on any machine: without this, kernels decide whether a layer is worth packing."""

from __future__ import annotations

import pytest

from kvboost.hf.measured import KeptMeasurement
from kvboost.hf.numerics import tiles
from kvboost.hf.numerics.rows import RowSizes


def pack_all(monkeypatch: pytest.MonkeyPatch, *, anew: bool = True) -> None:
    """Until the test ends, every layer that can be packed is."""
    if anew:  # a kept measurement may say that none is
        monkeypatch.setattr(KeptMeasurement, "read", lambda _: None)
        monkeypatch.setattr(KeptMeasurement, "write", lambda *_: None)
    monkeypatch.setattr(tiles, "_choose", lambda *_, packable, wanted, limit: (RowSizes(1, 32, (), 24), packable))
