"""Plots as SVG text, for the HTML report: axes, dots and lines in the page's own colours.

Used by :mod:`benchmarks.bench.page`. Invariant: the same data give the same text, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]

_WIDTH, _HEIGHT = 520, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 44
COLOURS = 10
"""The page has so many classes s0, s1, ... for series: one for each workload."""


@dataclass(frozen=True)
class Plot:
    """One pair of axes. A name has one colour in all plots: the caller's ``colours``."""

    title: str
    x_label: str
    y_label: str
    dots: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    lines: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    log_y: bool = False
    log_x: bool = False
    level: float | None = None
    """A dashed line at this height."""

    def names(self) -> list[str]:
        """The series that it shows."""
        return list(dict.fromkeys([*self.dots, *self.lines]))


class _Axis:
    """Values along one direction, as places on the page."""

    def __init__(self, values: Sequence[float], begin: float, end: float, *, log: bool) -> None:
        self._log = log
        low, high = min(values), max(values)
        if log:
            low, high = max(low, 1e-9), max(high, 1e-9)
            self._low, self._high = math.log10(low) - 0.05, math.log10(high) + 0.05
        else:
            low = min(0.0, low)
            self._low, self._high = low, high + 0.05 * (high - low or 1.0)
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        """Where a value lies."""
        place = math.log10(max(value, 1e-9)) if self._log else value
        return self._begin + (place - self._low) / (self._high - self._low) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """Round values to write at the axis."""
        if self._log:
            first, last = math.floor(self._low), math.ceil(self._high)
            found = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
            shown = [value for value in found if self._low <= math.log10(value) <= self._high]
            if len(shown) < 3:  # less than a decade
                low, high = 10.0**self._low, 10.0**self._high
                return _steps(low, high)
            return shown if len(shown) <= 7 else [v for v in shown if f"{v:e}"[0] == "1"] or shown[:7]
        return _steps(self._low, self._high)


def _steps(low: float, high: float) -> list[float]:
    """Round values at equal distances, six at most."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == round(value) else f"{value:.3g}"


def svg(plot: Plot, colours: Mapping[str, int]) -> str:
    """The plot; an empty text if it has no points."""
    points = [point for series in (*plot.dots.values(), *plot.lines.values()) for point in series]
    if not points:
        return ""
    levels = [plot.level] if plot.level is not None else []
    x = _Axis([point[0] for point in points], _LEFT, _WIDTH - _RIGHT, log=plot.log_x)
    y = _Axis([*(point[1] for point in points), *levels], _HEIGHT - _BOTTOM, _TOP, log=plot.log_y)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(plot.title)}">']
    for value in y.ticks():
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y.at(value):.1f}" y2="{y.at(value):.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{y.at(value) + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in x.ticks():
        parts.append(
            f'<text x="{x.at(value):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_number(value)}</text>'
        )
    base = _HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    if plot.level is not None:
        height = f"{y.at(plot.level):.1f}"
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height}" y2="{height}"/>')
    middle = (_TOP + base) / 2
    parts.append(
        f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(plot.x_label)}</text>'
    )
    parts.append(
        f'<text transform="translate(12 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(plot.y_label)}</text>'
    )
    for name, series in plot.lines.items():
        path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in sorted(series))
        parts.append(f'<polyline class="s{colours[name] % COLOURS}" points="{path}"/>')
    for name, series in plot.dots.items():
        for a, b in series:
            label = f"{name}: {_number(a)}, {_number(b)}"
            parts.append(
                f'<circle class="s{colours[name] % COLOURS}" cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="3">'
                f"<title>{escape(label)}</title></circle>"
            )
    return "".join([*parts, "</svg>"])
