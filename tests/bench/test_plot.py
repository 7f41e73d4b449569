"""Plots: well-formed, everything inside the picture, every line with its legend."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from kvboost.bench.plot import Panel, Point, _linear_ticks, _log_ticks, svg

LINES = {
    "none": [Point(0, 0.2, 0.1, 0.3)],
    "query & more": [Point(0, 0.2, 0.1, 0.3), Point(15, 0.02, 0.01, 0.04), Point(30, 0.001, 0.0, 0.002)],
}
KL = Panel("a < b", "rows, %", "KL", LINES, log=True)
TOP1 = Panel("top", "rows, %", "equal, %", {"none": [Point(0, 90, 80, 95)]})


def test_a_plot_is_xml_with_axes_lines_and_legend() -> None:
    drawing = svg([KL, TOP1])
    root = ElementTree.fromstring(drawing)
    texts = ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]
    for text in ("a < b", "rows, %", "KL", "equal, %", "none", "query & more", "0.1", "0.001"):
        assert text in texts
    assert sum(element.tag.endswith("polyline") for element in root.iter()) == 1  # one point makes no line
    assert drawing == svg([KL, TOP1])


def test_everything_lies_inside_its_panel() -> None:
    points = re.findall(r'polyline points="([^"]+)"', svg([KL]))
    numbers = [tuple(map(float, pair.split(","))) for line in points for pair in line.split()]
    assert all(66 <= x <= 406 and 34 <= y <= 254 for x, y in numbers)
    heights = [y for _, y in sorted(numbers)]
    assert heights == sorted(heights)  # smaller values lie lower


def test_values_at_zero_are_left_out_of_a_log_axis_and_no_data_says_so() -> None:
    nothing = Panel("x", "x", "y", {"all": [Point(0, 0.0, 0.0, 0.0)]}, log=True)
    assert "no data" in svg([nothing])
    assert "no data" in svg([Panel("x", "x", "y", {})])


@pytest.mark.parametrize(("low", "high"), [(0.0, 30.0), (87.0, 100.0), (0.0, 1.0), (5.0, 5.0), (0.0, 0.0), (-3.0, 2.0)])
def test_linear_ticks_enclose_the_values(low: float, high: float) -> None:
    ticks = _linear_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 12


@pytest.mark.parametrize(("low", "high"), [(0.01, 0.3), (1e-9, 1.0), (0.02, 0.02), (0.1, 0.1), (3.0, 4000.0)])
def test_log_ticks_enclose_the_values(low: float, high: float) -> None:
    ticks = _log_ticks(low, high)
    assert ticks[0] <= low * (1 + 1e-9)
    assert ticks[-1] >= high * (1 - 1e-9)
    assert len(ticks) >= 2
