"""The page of a GPU day: one file that needs nothing else, with what failed at its top.

Written by :mod:`benchmarks.exact.gpu_day` after every section. Invariant: nothing is on it that is not in the file of
the day, from which paths and names have been taken out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.gpu.day import FAILED, NOT_RUN, PASSED
from benchmarks.gpu.record import BEGUN, DONE, DayFile, failures

_KINDS = {PASSED: "good", FAILED: "bad", NOT_RUN: "soft"}


def html_page(day: DayFile, titles: Mapping[str, str]) -> str:
    """The whole page. ``titles`` are all sections, in their order."""
    found = {name: day.sections[name] for name in titles if name in day.sections}
    bad = {name: section for name, section in found.items() if failures(section)}
    ordered = [*bad, *(name for name in found if name not in bad)]
    parts = [_failed(bad, titles), _summary(day, found, titles), _setup(day)]
    parts += [_section(titles[name], found[name], day) for name in ordered]
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return page.substitute(model=escape(day.setup["model"]), sections="\n  ".join(part for part in parts if part))


def _summary(day: DayFile, found: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    rows = []
    for name, title in titles.items():
        section = found.get(name, {"state": NOT_RUN})
        counts = Counter(check["status"] for check in section.get("checks", []))
        state = "begun; it did not end" if section["state"] == BEGUN else section["state"]
        verdict = FAILED if counts[FAILED] else PASSED if state == DONE else state
        told = ", ".join(f"{count} {status}" for status, count in counts.items())
        if name in found and day.otherwise(section):
            told += "; from an earlier run with other settings"
        rows.append([title, verdict, told, _minutes(section.get("seconds"))])
    return _card("Sections", _table(["section", "", "checks", "took"], rows, status=1))


def _failed(bad: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    rows = [
        [titles[name], check["what"], check["found"], check["expected"]]
        for name, section in bad.items()
        for check in failures(section)
    ]
    return _card("What failed", _table(["section", "what", "found", "expected"], rows), "failed") if rows else ""


def _setup(day: DayFile) -> str:
    rows = [[name, str(value)] for name, value in (*day.setup.items(), *day.settings.items())]
    return _card("Measured on", _table(["", ""], rows))


def _section(title: str, section: Mapping[str, Any], day: DayFile) -> str:
    checks = sorted(section.get("checks", []), key=lambda check: check["status"] != FAILED)
    rows = [[check["status"], check["what"], check["found"], check["expected"]] for check in checks]
    inner = _table(["", "what", "found", "expected"], rows, status=0) if rows else f"<p>{escape(section['state'])}</p>"
    if other := day.otherwise(section):
        told = ", ".join(f"{name} {value}" for name, value in other.items())
        inner = f'<p class="bad">From an earlier run, with {escape(told)}</p>{inner}'
    for table in section.get("tables", []):
        notes = "".join(f'<p class="soft small">{escape(note)}</p>' for note in table["notes"])
        inner += f"<h3>{escape(table['title'])}</h3>{_table(table['columns'], table['rows'])}{notes}"
    return _card(title, inner)


def _card(title: str, inner: str, kind: str = "") -> str:
    return f'<section class="card {kind}"><h2>{escape(title)}</h2>{inner}</section>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, status: int | None = None) -> str:
    """A table; the column ``status`` is coloured by what it says."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    head = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    body = "".join(
        f"<tr>{''.join(_cell(cell, place == status) for place, cell in enumerate(row))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _cell(text: str, is_status: bool) -> str:
    kind = f' class="status {_KINDS.get(text, "soft")}"' if is_status else ""
    return f"<td{kind}>{escape(text)}</td>"


def _minutes(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
