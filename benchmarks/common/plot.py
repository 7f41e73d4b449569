"""Line plots with intervals, drawn by matplotlib (in the dev extra).

Used by benchmarks that write a plot. Invariant: the same data give the same file, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Okabe and Ito's colours, which stay apart for colour-blind readers; markers tell lines apart without any.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "os^D"


@dataclass(frozen=True)
class Point:
    """A value with the interval it may lie in."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """One pair of axes. ``lines`` maps a name to its points; a name has one colour in all panels."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, list[Point]]
    log: bool = False
    """A logarithmic y axis."""


def save(panels: Sequence[Panel], file: Path, *, columns: int = 2) -> None:
    """Draw the panels in a grid with one legend below; the file's ending says the format."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
        for name, points in panel.lines.items():
            number = names.index(name)
            below = [point.y - point.low for point in points]
            above = [point.high - point.y for point in points]
            axes.errorbar(
                [point.x for point in points],
                [point.y for point in points],
                yerr=[below, above],
                label=name,
                color=_COLOURS[number % len(_COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
            )
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, yscale="log" if panel.log else "linear")
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
    with matplotlib.rc_context({"svg.hashsalt": "kvboost"}):
        figure.savefig(file, metadata={"Date": None})
