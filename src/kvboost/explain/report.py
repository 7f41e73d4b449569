"""What became of a log of prompts, a bar for each, and the faults: as data, as text and as one HTML file.

Made by :func:`explain` for ``kvboost explain``. Invariant: in HTML the text of prompts is escaped, and the page runs no
script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from string import Template
from typing import Any

import numpy as np

from kvboost.core.chunking import BreakTable, NaturalChunker
from kvboost.explain.differences import Decode
from kvboost.explain.faults import Fault, gather, losses_of
from kvboost.explain.replay import LoggedPrompt, Replay, Replayed

CHUNK_TOKENS = 32
EXACT, KNOWN, NEW = "exact", "known", "new"
_WIDTH = 48
_TEXT_BARS, _PAGE_BARS = 40, 200  # at most
_SIGNS = {EXACT: "#", KNOWN: "+", NEW: "."}


@dataclass(frozen=True)
class PromptBar:
    """One prompt: where its tokens come from."""

    line: int
    """Where it stands in the log."""
    runs: tuple[tuple[str, int], ...]
    """From its beginning: ``exact``, ``known`` (from elsewhere) or ``new``, and how many tokens."""
    common: int
    """Where the longest beginning that an earlier prompt shares ends."""
    lost: int
    """Tokens that its faults cost."""

    @property
    def tokens(self) -> int:
        """Its length."""
        return sum(tokens for _, tokens in self.runs)

    def count(self, kind: str) -> int:
        """Tokens of one kind."""
        return sum(tokens for name, tokens in self.runs if name == kind)


@dataclass(frozen=True)
class Explanation:
    """A log of prompts, replayed."""

    bars: tuple[PromptBar, ...]
    faults: tuple[Fault, ...]
    tokens_per_second: float | None = None
    """How fast prompts are prefilled; None tells costs in tokens only."""

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(bar.tokens for bar in self.bars)

    def count(self, kind: str) -> int:
        """Tokens of one kind, of all prompts."""
        return sum(bar.count(kind) for bar in self.bars)

    def seconds(self, tokens: int) -> float | None:
        """What these tokens take to compute."""
        return tokens / self.tokens_per_second if self.tokens_per_second is not None else None

    def cost(self, tokens: int) -> str:
        """Tokens in words, with their share and their seconds."""
        share = 100 * tokens / max(1, self.tokens)
        seconds = self.seconds(tokens)
        return f"{tokens:,} tokens ({share:.1f} %)" + (f", {seconds:,.1f} s" if seconds is not None else "")

    def as_dict(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "prompts": len(self.bars),
            "tokens": {"all": self.tokens, **{kind: self.count(kind) for kind in (EXACT, KNOWN, NEW)}},
            "tokens_per_second": self.tokens_per_second,
            "faults": [
                {
                    "kind": fault.kind.value,
                    "title": fault.title,
                    "example": fault.evidence,
                    "change": fault.change,
                    "tokens": fault.tokens,
                    "seconds": self.seconds(fault.tokens),
                    "log_lines": fault.lines,
                }
                for fault in self.faults
            ],
            "bars": [
                {"log_line": bar.line, "runs": bar.runs, "common_prefix": bar.common, "lost": bar.lost}
                for bar in self.bars
            ],
        }


def explain(
    prompts: Iterable[LoggedPrompt],
    *,
    decode: Decode,
    breaks: BreakTable | None = None,
    tokens_per_second: float | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Explanation:
    """Replay a log against a store that keeps everything.

    ``decode`` turns token ids into text, special tokens included. ``breaks`` is the tokenizer's table, as the engine's
    chunker has it. ``progress`` is called after each prompt.
    """
    replay = Replay(NaturalChunker(CHUNK_TOKENS, breaks))
    bars, found = [], []
    for prompt in prompts:
        replayed = replay.add(prompt)
        losses = losses_of(replayed, replay.prompts, decode)
        found.append((prompt, losses))
        bars.append(PromptBar(prompt.line, _runs(replayed), replayed.common, sum(loss.tokens for loss in losses)))
        progress()
    faults = gather(found, all_tokens=sum(bar.tokens for bar in bars))
    return Explanation(tuple(bars), tuple(faults), tokens_per_second)


def _runs(replayed: Replayed) -> tuple[tuple[str, int], ...]:
    kinds = np.where(replayed.known, 1, 2)
    kinds[: replayed.exact] = 0
    names = (EXACT, KNOWN, NEW)
    return tuple((names[kind], len(list(tokens))) for kind, tokens in groupby(kinds.tolist()))


def text_report(explanation: Explanation) -> str:
    """Everything a person needs, in lines."""
    bars = shown_bars(explanation, most=_TEXT_BARS)
    longest = max(bar.tokens for bar in explanation.bars)
    lines = [f"{len(explanation.bars)} prompts, {explanation.tokens:,} tokens; in a cache that keeps everything:"]
    for sign, words, kind in (
        ("#", "reused exactly", EXACT),
        ("+", "known, but behind other text", KNOWN),
        (".", "new", NEW),
    ):
        count = explanation.count(kind)
        lines.append(f"  {sign} {words:<30}{count:>12,}  {100 * count / max(1, explanation.tokens):5.1f} %")
    lines += ["", f"{'log line':>8}  {'tokens':>7}  | is where the beginning shared with an earlier prompt ends"]
    lines += [f"{bar.line:>8}  {bar.tokens:>7}  {_bar(bar, longest)}" for bar in bars]
    if len(bars) < len(explanation.bars):
        lines.append(f"{'':>8}  the {len(bars)} of {len(explanation.bars)} prompts that lost most are shown")
    lines.append("")
    if not explanation.faults:
        lines.append("No fault found: what can be reused exactly is.")
    for number, fault in enumerate(explanation.faults, 1):
        lines += [
            f"{number}. {fault.title}",
            f"   costs     {explanation.cost(fault.tokens)} in {len(fault.lines)} prompts",
            f"   example   {fault.evidence}",
            f"   change    {fault.change}",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def shown_bars(explanation: Explanation, *, most: int) -> list[PromptBar]:
    """All prompts in the log's order; of a long log those that lost most."""
    worst = sorted(explanation.bars, key=lambda bar: -bar.lost)[:most]
    chosen = {id(bar) for bar in worst}
    return [bar for bar in explanation.bars if id(bar) in chosen]


def _bar(bar: PromptBar, longest: int) -> str:
    """As long as the prompt, beside the longest one."""
    width = max(1, round(_WIDTH * bar.tokens / longest))
    kinds = [kind for kind, tokens in bar.runs for _ in range(tokens)]
    signs = [_SIGNS[kinds[min(len(kinds) - 1, at * len(kinds) // width)]] for at in range(width)]
    signs.insert(round(width * bar.common / max(1, bar.tokens)), "|")
    return "".join(signs)


def html_page(explanation: Explanation) -> str:
    """The page, with a bar for each prompt; of a long log for those that lost most."""
    template = Template(files("kvboost.explain").joinpath("page.html").read_text(encoding="utf-8"))
    bars = shown_bars(explanation, most=_PAGE_BARS)
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
        f'<div class="soft small">{_amount(explanation, tokens)}</div></div>'
        for name, tokens in shown
    ]


def _amount(explanation: Explanation, tokens: int) -> str:
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
