"""What became of a log of prompts: a bar for each, and the faults.

Made by :func:`explain` for ``kvboost explain``; :mod:`kvboost.explain.report` shows it.
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
