"""The HTML report: one file with tables and plots that needs nothing else.

Called by :mod:`benchmarks.approx.bench` and :mod:`benchmarks.approx.bench_report` with what files of samples hold.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.bench import summary
from benchmarks.bench.contestants import OURS, RIVALS
from benchmarks.bench.plots import COLOURS, Plot, Point, svg
from benchmarks.bench.run import CAPACITY, RECOMPUTE
from benchmarks.bench.summary import Pairing
from benchmarks.bench.workloads import RECIPES
from kvboost.bench.compare import EXACT, Sample

_FASTER = summary.COLUMNS.index("faster")


def html_report(runs: Sequence[tuple[Mapping[str, Any], Sequence[Sample]]]) -> str:
    """A page over the header and the samples of each file."""
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return page.substitute(sections="\n  ".join(_section(header, samples) for header, samples in runs))


def _section(header: Mapping[str, Any], samples: Sequence[Sample]) -> str:
    found, machine = summary.pairings(samples), summary.machine_of(header, samples)
    settings = ", ".join(f"{name} {value}" for name, value in header["settings"].items() if value is not None)
    plots = [svg_card(plot) for plot in _plots(found, samples)]
    notes = "".join(f"<li>{escape(note)}</li>" for note in summary.notes(found, samples))
    rows = [(summary.row(pairing), statistics.median(pairing.ratio())) for pairing in found]
    body = "".join(_row(cells, ratio) for cells, ratio in rows)
    more = "".join(_row(summary.details(pairing), None) for pairing in found)
    asked = dict.fromkeys(sample["workload"] for sample in samples)
    kinds = "".join(f"<li><b>{name}</b>: {escape(RECIPES[name].about)}</li>" for name in asked if name in RECIPES)
    return "\n  ".join(
        [
            f"<h2>{escape(str(header['settings']['model']))}</h2>",
            f'<p class="soft small">{escape(machine.line)}<br>Settings: {escape(settings)}<br>'
            f"{escape(_versions(samples))}</p>",
            _table("First token", summary.COLUMNS, body, f'<ul class="soft small">{notes}</ul>'),
            f'<section class="plots">{"".join(plots)}</section>',
            _table("Theirs / ours", summary.DETAILS, more, ""),
            f'<section class="card"><h3>Workloads</h3><ul class="small">{kinds}</ul></section>' if kinds else "",
        ]
    )


def _table(title: str, columns: Sequence[str], rows: str, below: str) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<section class="card"><h3>{escape(title)}</h3><div class="scroll">{table}</div>{below}</section>'


def _row(cells: Sequence[str], ratio: float | None) -> str:
    """A row; where there is a ratio, its cell says by its colour who was faster."""
    kind = "" if ratio is None else "win" if ratio > 1.05 else "loss" if ratio < 0.95 else ""
    return (
        "<tr>"
        + "".join(
            f'<td class="{kind}">{escape(cell)}</td>' if kind and place == _FASTER else f"<td>{escape(cell)}</td>"
            for place, cell in enumerate(cells)
        )
        + "</tr>"
    )


def _versions(samples: Sequence[Sample]) -> str:
    """Which versions took part, each contestant once."""
    told: dict[str, str] = {}
    for sample in samples:
        for name, versions in sample.get("versions", {}).items():
            packages = [f"{package} {version}" for package, version in versions.items()]
            told[name] = ", ".join([*packages, str(sample["dtypes"][name] or "dtype of its file")])
    return "; ".join(f"{name}: {versions}" for name, versions in told.items())


def svg_card(plot: Plot) -> str:
    """A plot with its title and its legend."""
    colours = _colours(plot.names())
    drawn = svg(plot, colours)
    if not drawn:
        return ""
    legend = "".join(f'<span><i class="s{colours[name] % COLOURS}"></i>{escape(name)}</span>' for name in plot.names())
    return (
        f'<section class="card"><h3>{escape(plot.title)}</h3>{drawn}<p class="legend small soft">{legend}</p></section>'
    )


def _colours(names: Sequence[str]) -> dict[str, int]:
    """Contestants have the same colour everywhere, ours the first; other names have one each."""
    contestants = [f"{OURS} {EXACT}", *RIVALS]
    if any(name in contestants for name in names):
        others = [name for name in names if name not in contestants]
        return {name: number for number, name in enumerate([*contestants, *others])}
    return {name: number for number, name in enumerate(names)}


def _plots(found: Sequence[Pairing], samples: Sequence[Sample]) -> list[Plot]:
    return [_by_length(found), _by_reuse(found), _by_recomputed(samples), _by_capacity(samples)]


def _by_length(found: Sequence[Pairing]) -> Plot:
    """Of the documents, whose lengths differ; of everything where there are none."""
    documents = [pairing for pairing in found if pairing.workload == "document"] or found
    dots: dict[str, list[Point]] = {}
    for pairing in documents:
        own = dots.setdefault(f"{OURS} {pairing.engine}", [])
        theirs = dots.setdefault(pairing.rival, [])
        own += zip(pairing.prompts, (one["ttft_ms"] for one in pairing.ours), strict=True)
        theirs += zip(pairing.prompts, (one["ttft_ms"] for one in pairing.theirs), strict=True)
    lines = {name: summary.medians_by_length(points) for name, points in dots.items()} if documents is not found else {}
    return Plot("First token against prompt length", "prompt tokens", "ms", dots, lines, log_y=True, log_x=True)


def _by_reuse(found: Sequence[Pairing]) -> Plot:
    dots: dict[str, list[Point]] = {}
    for pairing in found:
        shares = [100 * share for share in pairing.reuse()]
        name = pairing.rival if pairing.engine == EXACT else f"{pairing.rival}, ours {pairing.engine}"
        dots.setdefault(name, []).extend(zip(shares, pairing.ratio(), strict=True))
    return Plot(
        "Speed-up against reuse", "% of the prompt reused by ours", "theirs / ours", dots, log_y=True, level=1.0
    )


def _by_recomputed(samples: Sequence[Sample]) -> Plot:
    dots: dict[str, list[Point]] = {}
    lines: dict[str, list[Point]] = {}
    for sample in samples:
        if sample["rival"] != RECOMPUTE:
            continue
        for point in sample["points"]:
            values = [(100 * one["recomputed"], one["kl"]) for one in point["requests"]]
            if values:
                dots.setdefault(sample["workload"], []).extend(values)
                means = tuple(statistics.fmean(column) for column in zip(*values, strict=True))
                lines.setdefault(sample["workload"], []).append((means[0], means[1]))
    return Plot("Quality against positions recomputed", "% of moved tokens recomputed", "KL from plain", dots, lines)


def _by_capacity(samples: Sequence[Sample]) -> Plot:
    lines = {
        sample["workload"]: [(capacity, 100 * rate) for capacity, rate in sample["rates"]]
        for sample in samples
        if sample["rival"] == CAPACITY
    }
    return Plot("Hit rate against capacity", "tokens of KV that the cache holds", "% of tokens found", lines=lines)
