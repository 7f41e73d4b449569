"""The picture of the server's page: a real server under a mixed load, then a browser.

Starts ``kvboost serve`` for the model, sends a chat of several turns, questions behind one system prompt and passages
in changing order, and writes what headless Chromium shows (Debian's ``chromium``).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from openai import OpenAI

from benchmarks.common.report import BenchError, Report

QUICK = {"out": Path(tempfile.gettempdir()) / "kvboost-page.png"}

_SYSTEM = "You are the help desk of a small library. Answer in one sentence, kindly, and say where to look. " * 12
_PASSAGES = [
    f"Passage {n}. " + f"In room {n} stand books about {topic}; they may be taken home for {n + 2} weeks. " * 9
    for n, topic in enumerate(("the sea", "old maps", "birds", "bridges"), 1)
]
_TURNS = ("When do you open?", "And on Sundays?", "May I bring my dog?", "Thank you. Is there coffee?")
_QUESTIONS = ("Where are the maps?", "How do I renew a book?", "Is there a quiet room?", "Can I print here?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, help="folder of a chat model (config.json and weights)")
    parser.add_argument("--out", type=Path, default=Path("page.png"), help="the picture (default page.png)")
    parser.add_argument("--dark", action="store_true", help="the page in its dark colours")


def run(args: argparse.Namespace) -> Report:
    """Load, then the picture."""
    chromium = find_browser()
    if args.model is None:
        raise BenchError("this benchmark needs a model; give its folder with --model FOLDER")
    command = [sys.executable, "-m", "kvboost", "serve", str(args.model), "--port", "0", "--quality", "fast"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TZ": "UTC"}) as server:
        try:
            address = _address(server)
            with OpenAI(base_url=f"{address}/v1", api_key="none", timeout=600) as client:
                _load(client, args.model.name)
            take(chromium, address, args.out.expanduser().resolve(), dark=args.dark)
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
        finally:
            server.kill()
    report = Report("screenshot")
    table = report.table("The server's page", ["picture", "bytes"], model=args.model)
    table.add(args.out.name, f"{args.out.expanduser().stat().st_size:,}")
    return report


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    for line in server.stderr:
        if match := re.search(r"serving on (http://\S+)", line):
            return match[1]
    raise BenchError("the server did not start; run kvboost serve MODEL to see why")


def _load(client: OpenAI, model: str) -> None:
    """What people send: a chat, questions behind one system prompt, passages in changing order."""

    def ask(messages: list[Any]) -> str:
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
        return answer.choices[0].message.content or ""

    system = {"role": "system", "content": _SYSTEM}
    chat: list[Any] = [system]
    for turn, question in zip(_TURNS, _QUESTIONS, strict=True):
        chat.append({"role": "user", "content": turn})
        chat.append({"role": "assistant", "content": ask(chat)})
        ask([system, {"role": "user", "content": question}])
    for first in range(len(_PASSAGES)):
        chosen = [_PASSAGES[(first + step) % len(_PASSAGES)] for step in (0, 2, 1)]
        parts = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in chosen]
        ask([{"role": "user", "content": [*parts, {"type": "text", "text": "How long may I keep a book?"}]}])


def find_browser() -> str:
    """Chromium's program."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise BenchError("this needs a browser: apt-get install chromium")
    return chromium


def take(chromium: str, address: str, picture: Path, *, dark: bool, window: str = "1400,1330") -> None:
    """What the browser shows at an address."""
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={window}"]
        options += [f"--user-data-dir={profile}", "--virtual-time-budget=4000", "--lang=en-GB"]
        options += ["--blink-settings=preferredColorScheme=0"] if dark else []
        environment = {**os.environ, "TZ": "UTC", "LANG": "en_GB.UTF-8"}
        command = [chromium, *options, f"--screenshot={picture}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
