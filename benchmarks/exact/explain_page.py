"""The picture that ``examples/explain/page.py`` draws of a made-up log, taken by a browser.

The log has a date in line 2, dropped turns and shuffled passages.
Only the model's tokenizer is used. Needs Debian's ``chromium``.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common.report import BenchError, Report
from benchmarks.serve.screenshot import find_browser, take

QUICK = {"out": Path(tempfile.gettempdir()) / "kvboost-explain.png"}

_PROGRAM = Path(__file__).parents[2] / "examples" / "explain" / "page.py"
_TOPICS = ("loans", "the reading room", "printing", "lost cards", "fines", "the archive", "guided tours", "quiet hours")
_RULES = "\n".join(
    f"Rule {n}. When a visitor asks about {t}, name the desk, the hours and the fee." for n, t in enumerate(_TOPICS, 1)
)
_PASSAGES = [
    f"About {topic}. Desk {n} on floor {n % 3} cares for {topic}. It opens at {8 + n % 3} and ends at {16 + n % 4}. "
    f"Members pay nothing for {topic}; guests pay {n} euros a day. Questions about {topic} may also be sent by mail. "
    f"They are answered within {n + 1} days.\n\n"
    for n, topic in enumerate(_TOPICS, 1)
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, help="folder with a tokenizer")
    parser.add_argument("--out", type=Path, default=Path("explain.png"), help="the picture (default explain.png)")
    parser.add_argument("--dark", action="store_true", help="the page in its dark colours")
    parser.add_argument("--window", default="1100,1000", metavar="WIDTH,HEIGHT", help="default: 1100,1000")


def run(args: argparse.Namespace) -> Report:
    """The log, the command, the picture."""
    chromium = find_browser()
    if args.model is None:
        raise BenchError("this benchmark needs a tokenizer; give its folder with --model FOLDER")
    picture = args.out.expanduser().resolve()
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder) / "prompts.jsonl", Path(folder) / "explain.html"
        log.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in _prompts()))
        command = [
            sys.executable,
            "-m",
            "kvboost",
            "explain",
            str(log),
            "--model",
            str(args.model),
            "--json",
            "--tokens-per-second",
            "400",
        ]
        said = Path(folder) / "explain.json"
        said.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
        explained = json.loads(said.read_text())
        subprocess.run([sys.executable, str(_PROGRAM), str(said), "--out", str(page)], check=True, capture_output=True)
        take(chromium, page.as_uri(), picture, dark=args.dark, window=args.window)
    report = Report("explain_page")
    table = report.table("Faults in a made-up log", ["fault", "tokens"], model=args.model)
    for fault in explained["faults"]:
        table.add(fault["title"], f"{fault['tokens']:,}")
    return report


def _prompts() -> list[str]:
    """Three applications of a library's help desk, one after the other."""
    rng = random.Random(2)
    asked = [
        f"A visitor asks: where do I find {rng.choice(_TOPICS)}, and what about {rng.choice(_TOPICS)}?"
        for _ in range(24)
    ]
    dated = [
        "You are the help desk of a library.\n"
        f"Today is 2026-11-{day:02}, {9 + day % 8}:{(day * 17) % 60:02}.\n{_RULES}\n{question}\n"
        for day, question in enumerate(asked[:8], 3)
    ]
    shuffled = [
        "Answer from the passages.\n\n" + "".join(rng.sample(_PASSAGES, 5)) + question for question in asked[8:16]
    ]
    turns = [f"Visitor: {question}\nDesk: {_PASSAGES[n % 8].strip()}\n" for n, question in enumerate(asked[8:])]
    windows = [
        "A chat at the help desk.\n" + "".join(turns[max(0, n - 4) : n]) + f"Visitor: turn {n}?" for n in range(1, 10)
    ]
    return [*dated, *shuffled, *windows]
