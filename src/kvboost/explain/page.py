"""An explanation as one HTML file that needs nothing else.

Used by ``kvboost explain --html``. Invariant: text of prompts is escaped, and the page runs no script.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files
from string import Template

from kvboost.explain.explanation import EXACT, KNOWN, NEW, Explanation, PromptBar
from kvboost.explain.faults import Fault
from kvboost.explain.text import shown_bars

_BARS = 200


def html_page(explanation: Explanation) -> str:
    """The page, with a bar for each prompt; of a long log for those that lost most."""
    template = Template(files("kvboost.explain").joinpath("page.html").read_text(encoding="utf-8"))
    bars = shown_bars(explanation, most=_BARS)
    longest = max(bar.tokens for bar in explanation.bars)
    hidden = len(bars) < len(explanation.bars)
    note = f"The {len(bars)} of {len(explanation.bars)} prompts that lost most are shown." if hidden else ""
    return template.substitute(
        summary=f"{len(explanation.bars)} prompts, {explanation.tokens:,} tokens, in a cache that keeps everything.",
        cards="".join(_cards(explanation)),
        faults="".join(_fault(explanation, fault) for fault in explanation.faults) or _NO_FAULT,
        rows="\n    ".join(_row(bar, longest) for bar in bars),
        note=f'<p class="small soft" style="margin-top:8px">{note}</p>' if note else "",
    )


_NO_FAULT = '<section class="card"><h2>No fault found</h2><p>What can be reused exactly is.</p></section>'


def _cards(explanation: Explanation) -> list[str]:
    shown = [
        ("Reused exactly", explanation.count(EXACT)),
        ("Known, but behind other text", explanation.count(KNOWN)),
        ("New", explanation.count(NEW)),
        ("Lost by the faults below", sum(fault.tokens for fault in explanation.faults)),
    ]
    return [
        f'<div class="card"><div class="soft small">{name}</div>'
        f'<div class="number">{100 * tokens / max(1, explanation.tokens):.1f} %</div>'
        f'<div class="soft small">{_told(explanation, tokens)}</div></div>'
        for name, tokens in shown
    ]


def _told(explanation: Explanation, tokens: int) -> str:
    seconds = explanation.seconds(tokens)
    return f"{tokens:,} tokens" + (f", {seconds:,.1f} s" if seconds is not None else "")


def _fault(explanation: Explanation, fault: Fault) -> str:
    return (
        f'<section class="card fault"><header><h2>{escape(fault.title)}</h2>'
        f'<span class="cost">{explanation.cost(fault.tokens)} in {len(fault.lines)} prompts</span></header>'
        f"<code>{escape(fault.evidence)}</code><p>{escape(fault.change)}</p></section>\n  "
    )


def _row(bar: PromptBar, longest: int) -> str:
    runs = "".join(f'<i class="{kind}" style="width:{100 * tokens / longest:.3f}%"></i>' for kind, tokens in bar.runs)
    mark = f'<i class="break" style="left:{100 * bar.common / longest:.3f}%"></i>' if bar.common else ""
    counts = ", ".join(f"{bar.count(kind)} {kind}" for kind in (EXACT, KNOWN, NEW))
    return (
        f'<div class="row small" title="{counts}"><span class="soft">{bar.line}</span>'
        f'<span class="bar">{runs}{mark}</span><span>{bar.tokens:,}</span><span>{bar.lost or ""}</span></div>'
    )
