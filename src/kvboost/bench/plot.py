"""Line plots as SVG, written by hand so that a benchmark needs no plotting library.

Used by measurements that write a plot. Invariant: the same data give the same file, to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, which stay apart for colour-blind readers; markers tell lines apart without any.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = ("circle", "square", "triangle", "diamond")
_WIDTH, _HEIGHT = 420, 300  # of a panel with its labels
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 34, 46  # from a panel's edge to its frame
_LEGEND_HEIGHT = 26
_LEGEND_ENTRY = 108


@dataclass(frozen=True)
class Point:
    """A value with the interval it may lie in."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """One pair of axes. ``lines`` maps a name to its points; names in the same order get the same colours."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, list[Point]]
    log: bool = False
    """A logarithmic y axis; points at or below zero are left out."""


def svg(panels: Sequence[Panel], *, columns: int = 2) -> str:
    """The panels in rows of ``columns``, and one legend below."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    rows = -(-len(panels) // columns)
    per_legend_row = max(1, columns * _WIDTH // _LEGEND_ENTRY)
    legend_rows = -(-len(names) // per_legend_row)
    width, height = columns * _WIDTH, rows * _HEIGHT + legend_rows * _LEGEND_HEIGHT + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        at = f"translate({number % columns * _WIDTH} {number // columns * _HEIGHT})"
        parts += [f'<g transform="{at}">', *_panel(panel, names), "</g>"]
    for number, name in enumerate(names):
        x = 20 + number % per_legend_row * _LEGEND_ENTRY
        y = rows * _HEIGHT + 14 + number // per_legend_row * _LEGEND_HEIGHT
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" stroke="{colour}" stroke-width="2"/>')
        parts.append(_marker(number, x + 13, y))
        parts.append(f'<text x="{x + 32}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, names: Sequence[str]) -> list[str]:
    drawn = {name: [point for point in points if point.y > 0 or not panel.log] for name, points in panel.lines.items()}
    every = [point for points in drawn.values() for point in points]
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    middle = (_LEFT + right) / 2
    parts = [
        f'<text x="{middle:g}" y="20" text-anchor="middle" font-weight="bold">{escape(panel.title)}</text>',
        f'<text x="{middle:g}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(panel.x_label)}</text>',
        f'<text transform="translate(16 {(_TOP + bottom) / 2:g}) rotate(-90)" text-anchor="middle">'
        f"{escape(panel.y_label)}</text>",
        f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" fill="none" stroke="#888888"/>',
    ]
    if not every:
        return [
            *parts,
            f'<text x="{middle:g}" y="{(_TOP + bottom) / 2:g}" text-anchor="middle">no data</text>',
        ]
    x_ticks = _linear_ticks(0.0, max(point.x for point in every) or 1.0)
    values = [value for point in every for value in (point.low, point.y, point.high) if value > 0 or not panel.log]
    y_ticks = _log_ticks(min(values), max(values)) if panel.log else _linear_ticks(min(values), max(values))
    scale = math.log10 if panel.log else float

    def x_of(value: float) -> float:
        return _LEFT + (right - _LEFT) * (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])

    def y_of(value: float) -> float:
        low, high = scale(y_ticks[0]), scale(y_ticks[-1])
        return bottom - (bottom - _TOP) * (scale(max(value, y_ticks[0])) - low) / (high - low)

    for tick in x_ticks:
        parts.append(_tick_line(x_of(tick), _TOP, x_of(tick), bottom))
        parts.append(f'<text x="{x_of(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in y_ticks:
        parts.append(_tick_line(_LEFT, y_of(tick), right, y_of(tick)))
        parts.append(f'<text x="{_LEFT - 6}" y="{y_of(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for name, points in reversed(drawn.items()):  # the first line lies on top
        number = names.index(name)
        colour = _COLOURS[number % len(_COLOURS)]
        if len(points) > 1:
            path = " ".join(f"{x_of(point.x):.1f},{y_of(point.y):.1f}" for point in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in points:
            x = f"{x_of(point.x):.1f}"
            parts.append(
                f'<line x1="{x}" y1="{y_of(point.low):.1f}" x2="{x}" y2="{y_of(point.high):.1f}" stroke="{colour}" '
                'stroke-opacity="0.5"/>'
            )
            parts.append(_marker(number, x_of(point.x), y_of(point.y)))
    return parts


def _tick_line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _marker(number: int, x: float, y: float) -> str:
    colour = _COLOURS[number % len(_COLOURS)]
    kind = _MARKERS[number % len(_MARKERS)]
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    shape = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        "triangle": ((0, -5), (5, 4), (-5, 4)),
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
    }[kind]
    corners = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shape)
    return f'<polygon points="{corners}" fill="{colour}"/>'


def _linear_ticks(low: float, high: float) -> list[float]:
    """Four to ten round numbers that enclose both ends."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... that enclose both ends; powers of ten only, where that would be too many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
    first = max(index for index, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    last = next((index for index, tick in enumerate(ticks) if tick >= high * (1 - 1e-9)), len(ticks) - 1)
    ticks = ticks[first : max(last, first + 1) + 1]
    if len(ticks) > 10:
        return [10.0**decade for decade in decades]
    return ticks
