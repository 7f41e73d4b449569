"""An explanation as text: a bar for each prompt, then the faults.

Used by ``kvboost explain``.
"""

from __future__ import annotations

from kvboost.explain.explanation import EXACT, KNOWN, NEW, Explanation, PromptBar

_WIDTH = 48
_BARS = 40
_SIGNS = {EXACT: "#", KNOWN: "+", NEW: "."}


def text_report(explanation: Explanation) -> str:
    """Everything a person needs, in lines."""
    bars = shown_bars(explanation, most=_BARS)
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
