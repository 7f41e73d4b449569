"""Draws what `kvboost explain --json` says as one HTML page: a bar for each prompt, and the faults.

kvboost explain prompts.jsonl --model MODEL --json > explain.json
python examples/explain/page.py explain.json --out explain.html

The page quotes prompts: they are escaped, and it runs no script.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any

BARS = 200  # at most: of a long log those of the prompts that lost most
KINDS = {"exact": "Reused exactly", "known": "Known, but behind other text", "new": "New"}
NO_FAULT = '<section class="card"><h2>No fault found</h2><p>What can be reused exactly is.</p></section>'


def html_page(explained: dict[str, Any]) -> str:
    """The page."""
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    everything = explained["bars"]
    worst = sorted(everything, key=lambda bar: -bar["lost"])[:BARS]
    chosen = {id(bar) for bar in worst}
    shown = [bar for bar in everything if id(bar) in chosen]
    longest = max(_tokens(bar) for bar in everything)
    hidden = len(shown) < len(everything)
    note = f"The {len(shown)} of {len(everything)} prompts that lost most are shown." if hidden else ""
    tokens = explained["tokens"]["all"]
    return template.substitute(
        summary=f"{explained['prompts']} prompts, {tokens:,} tokens, in a cache that keeps everything.",
        cards="".join(_cards(explained)),
        faults="".join(_fault(fault, tokens) for fault in explained["faults"]) or NO_FAULT,
        rows="\n    ".join(_row(bar, longest) for bar in shown),
        note=f'<p class="small soft" style="margin-top:8px">{note}</p>' if note else "",
    )


def _cards(explained: dict[str, Any]) -> list[str]:
    counts = {words: explained["tokens"][kind] for kind, words in KINDS.items()}
    counts["Lost by the faults below"] = sum(fault["tokens"] for fault in explained["faults"])
    rate = explained["tokens_per_second"]
    return [
        f'<div class="card"><div class="soft small">{words}</div>'
        f'<div class="number">{100 * tokens / max(1, explained["tokens"]["all"]):.1f} %</div>'
        f'<div class="soft small">{tokens:,} tokens{f", {tokens / rate:,.1f} s" if rate else ""}</div></div>'
        for words, tokens in counts.items()
    ]


def _fault(fault: dict[str, Any], all_tokens: int) -> str:
    seconds = f", {fault['seconds']:,.1f} s" if fault["seconds"] is not None else ""
    cost = f"{fault['tokens']:,} tokens ({100 * fault['tokens'] / max(1, all_tokens):.1f} %){seconds}"
    return (
        f'<section class="card fault"><header><h2>{escape(fault["title"])}</h2>'
        f'<span class="cost">{cost} in {len(fault["log_lines"])} prompts</span></header>'
        f"<code>{escape(fault['example'])}</code><p>{escape(fault['change'])}</p></section>\n  "
    )


def _row(bar: dict[str, Any], longest: int) -> str:
    widths = [(kind, 100 * tokens / longest) for kind, tokens in bar["runs"]]
    runs = "".join(f'<i class="{kind}" style="width:{width:.3f}%"></i>' for kind, width in widths)
    common = bar["common_prefix"]
    mark = f'<i class="break" style="left:{100 * common / longest:.3f}%"></i>' if common else ""
    counts = {kind: sum(tokens for name, tokens in bar["runs"] if name == kind) for kind in KINDS}
    title = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return (
        f'<div class="row small" title="{title}"><span class="soft">{bar["log_line"]}</span>'
        f'<span class="bar">{runs}{mark}</span><span>{_tokens(bar):,}</span><span>{bar["lost"] or ""}</span></div>'
    )


def _tokens(bar: dict[str, Any]) -> int:
    return sum(tokens for _, tokens in bar["runs"])


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("explained", type=Path, help="what kvboost explain --json said")
    parser.add_argument("--out", type=Path, default=Path("explain.html"), help="the page (default explain.html)")
    args = parser.parse_args()
    args.out.write_text(html_page(json.loads(args.explained.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
