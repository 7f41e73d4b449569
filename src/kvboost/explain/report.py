"""What became of a log of prompts, a bar for each, and the faults: as data and as text.

Made by :func:`explain` for ``kvboost explain``; ``examples/explain/page.py`` draws the data as a page. Invariant: every
token of a prompt is in one run of its bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from kvboost.core.chunking import BreakTable, NaturalChunker
from kvboost.explain.differences import Decode
from kvboost.explain.faults import Fault, gather, losses_of
from kvboost.explain.replay import LoggedPrompt, Replay, Replayed

CHUNK_TOKENS = 32
EXACT, KNOWN, NEW = "exact", "known", "new"
_WIDTH = 48
_BARS = 40  # at most
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
    worst = {id(bar) for bar in sorted(explanation.bars, key=lambda bar: -bar.lost)[:_BARS]}
    bars = [bar for bar in explanation.bars if id(bar) in worst]
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


def _bar(bar: PromptBar, longest: int) -> str:
    """As long as the prompt, beside the longest one."""
    width = max(1, round(_WIDTH * bar.tokens / longest))
    kinds = [kind for kind, tokens in bar.runs for _ in range(tokens)]
    signs = [_SIGNS[kinds[min(len(kinds) - 1, at * len(kinds) // width)]] for at in range(width)]
    signs.insert(round(width * bar.common / max(1, bar.tokens)), "|")
    return "".join(signs)
