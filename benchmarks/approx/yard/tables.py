"""Tables from files of samples: one for each model and history, and the models side by side.

Invariant: differences are paired by prompt; a prompt in which nothing was reused is counted, not averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.approx.yard.strategies import NONE
from benchmarks.common.journal import Kind
from benchmarks.common.quality import SEED, interval, mean_cell
from benchmarks.common.report import BenchError, Report
from kvboost.bench.report import Machine, Spread, Table, ratios

KIND = Kind("yardstick", 1, ("prompt", "history", "strategy"))
FLOOR = "floor"
Samples = list[dict[str, Any]]
_TITLES = {
    FLOOR: "Floors: what a full reading and exact reuse differ by",
    "alone": "Passages seen before alone",
    "unrelated": "Passages seen before behind two unrelated ones",
    "reordered": "Passages seen before in another order",
    "traffic": "Passages seen before in the traffic of other questions",
}
_COLUMNS = [
    "strategy",
    "prompts",
    "found, %",
    "recomputed, %",
    "KL",
    "KL less none's",
    "top-1, %",
    "regret",
    "decisive flips, %",
    "same answer, %",
    "F1",
    "F1 less full's",
]
_SPEED = "plain / this"
_NOTE = (
    f"Mean [95 % bootstrap interval over prompts, seed {SEED}]. KL(full || reuse) in nats over the full reading's "
    "greedy answer, fed to both. `regret`: log-probability of the full reading's best token less that of this one's, "
    "under the full reading. `decisive flips`: of all answer tokens, those whose best token changed although the full "
    "reading's led by more than 0.5 nat. `same answer`: greedy. `F1` against the gold answers; differences are paired "
    "by prompt. `recomputed`: of the reused tokens. `found`: of the passages' tokens that had been seen. `prompts`: "
    f"those in which something was reused. `{_SPEED}` (with --time): TTFT from the call, median [min max] of pairs."
)
_SIDE_BY_SIDE: dict[str, Callable[[Samples], str]] = {
    "KL": lambda samples: mean_cell(samples, "kl", digits=3),
    "decisive flips, %": lambda samples: mean_cell(samples, "decisive_share", factor=100, digits=1),
    "same answer, %": lambda samples: mean_cell(samples, "same_answer", factor=100, digits=0),
}


def report_of(files: Sequence[tuple[dict[str, Any], Samples]]) -> Report:
    """The tables of every file, and of all together where there are several."""
    if not any(samples for _, samples in files):
        raise BenchError("there are no samples yet; measure some with --out FILE first")
    report = Report("yardstick", raw={"files": [{**header, "samples": samples} for header, samples in files]})
    for header, samples in files:
        for history in _TITLES:
            if any(sample["history"] == history for sample in samples):
                report.tables.append(_table(header, samples, history))
    if len(files) > 1:
        report.tables += _side_by_side(files)
    report.tables[-1].notes.append(_NOTE)
    return report


def _name(header: dict[str, Any]) -> str:
    return f"{header['settings']['model']}, {header['settings']['dtype']}"


def _by_strategy(samples: Samples, history: str) -> dict[str, Samples]:
    """The samples of one history, by strategy as they come."""
    found: dict[str, Samples] = {}
    for sample in samples:
        if sample["history"] == history:
            found.setdefault(sample["strategy"], []).append(sample)
    return found


def _reused(samples: Samples) -> Samples:
    return [sample for sample in samples if sample["reused"]]


def _table(header: dict[str, Any], samples: Samples, history: str) -> Table:
    timed = bool(header["settings"]["timed"])
    columns = [*_COLUMNS, *([_SPEED] if timed else [])]
    table = Table(f"{_TITLES[history]}; {_name(header)}", Machine(**header["machine"]), columns)
    by_strategy = _by_strategy(samples, history)
    untouched = {sample["prompt"]: sample["kl"] for sample in _reused(by_strategy.get(NONE, []))}
    for label, every in by_strategy.items():
        reused = _reused(every)
        count = f"{len(reused)} of {len(every)}"
        if not reused:
            table.add(label, count, *["-"] * (len(columns) - 2))
            continue
        pairs = [s["kl"] - untouched[s["prompt"]] for s in reused if s["prompt"] in untouched]
        table.add(
            label,
            count,
            _percent(reused, "found") if history != FLOOR else "-",
            _percent(reused, "recomputed"),
            mean_cell(reused, "kl"),
            _difference(pairs, digits=4) if pairs and label != NONE else "-",
            mean_cell(reused, "top1", factor=100, digits=1),
            mean_cell(reused, "regret", digits=4),
            mean_cell(reused, "decisive_share", factor=100, digits=1),
            mean_cell(reused, "same_answer", factor=100, digits=0),
            mean_cell(reused, "f1", digits=3),
            _difference([s["f1"] - s["full_f1"] for s in reused], digits=3),
            *([_speed(reused)] if timed else []),
        )
    return table


def _percent(samples: Samples, name: str) -> str:
    return f"{100 * sum(sample[name] for sample in samples) / len(samples):.1f}"


def _difference(values: Sequence[float], *, digits: int) -> str:
    mean, low, high = interval(values)
    return f"{mean:+.{digits}f} [{low:+.{digits}f} {high:+.{digits}f}]"


def _speed(samples: Samples) -> str:
    timed = [sample for sample in samples if "ttft_ms" in sample]
    if not timed:
        return "-"
    return Spread.of(ratios([s["plain_ms"] for s in timed], [s["ttft_ms"] for s in timed])).text(2)


def _side_by_side(files: Sequence[tuple[dict[str, Any], Samples]]) -> list[Table]:
    """One table for each history and figure, with a column for each model."""
    names = [_name(header) for header, _ in files]
    machine = replace(Machine(**files[0][0]["machine"]), model="several", dtype="as named")
    tables = []
    for history, title in _TITLES.items():
        columns = [_by_strategy(samples, history) for _, samples in files]
        labels = list(dict.fromkeys(label for column in columns for label in column))
        for figure, cell in _SIDE_BY_SIDE.items() if labels else ():
            table = Table(f"{title}: {figure}", machine, ["strategy", *names])
            for label in labels:
                found = [_reused(column.get(label, [])) for column in columns]
                table.add(label, *(cell(samples) if samples else "-" for samples in found))
            tables.append(table)
    return tables
