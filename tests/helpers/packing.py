"""Packed weights on any machine: without this, kernels decide whether a layer is worth packing."""

from __future__ import annotations

import pytest

from kvboost.hf.numerics import tiles
from kvboost.hf.numerics.rows import RowSizes


def pack_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, every layer that can be packed is."""
    monkeypatch.setattr(tiles, "_choose", lambda *_, packable, wanted: (RowSizes(1, 32, (), 24), packable))
