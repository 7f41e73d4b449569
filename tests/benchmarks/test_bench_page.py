"""The page of the bench: its plots and their colours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.bench import page
from benchmarks.bench.page import _by_reuse, svg_card
from benchmarks.bench.plots import COLOURS, Plot
from benchmarks.bench.summary import Pairing


def test_ten_workloads_have_ten_colours_and_each_engine_its_own_dots() -> None:
    names = [f"workload {number}" for number in range(10)]
    card = svg_card(Plot("Title", "x", "y", lines={name: [(1.0, 2.0), (2.0, 3.0)] for name in names}))
    assert len(set(re.findall(r'<polyline class="(s\d+)"', card))) == 10
    styles = Path(page.__file__).with_name("page.html").read_text()
    assert all(styles.count(f"--c{number}: #") == 2 and f".s{number} {{" in styles for number in range(COLOURS))
    answers: list[Any] = [{"ttft_ms": 10.0, "cached": 5, "tokens": [1]}]
    found = [Pairing("rag", engine, [10], answers, answers, rival="plain") for engine in ("exact", "fast")]
    assert list(_by_reuse(found).dots) == ["plain", "plain, ours fast"]
