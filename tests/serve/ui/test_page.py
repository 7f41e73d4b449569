from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from kvboost import KVBoost
from tests.serve.conftest import Running

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_the_page_is_whole_and_carries_no_numbers(keyed: Running) -> None:
    answer = httpx.get(keyed.url + "/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"""(?:src|href)\s*=|https?://|@import|url\(""", answer.text), "nothing from elsewhere"
    assert "innerHTML" not in answer.text
    assert "tiny" not in answer.text


def _browse(url: str, folder: Path, *, picture: Path | None = None) -> str:
    """The page as a browser has it after a few seconds of its own time; and a picture, if asked for."""
    assert _CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1000"]
    options += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000"]
    for what in ([f"--screenshot={picture}"] if picture is not None else []) + ["--dump-dom"]:
        done = subprocess.run([_CHROMIUM, *options, what, url], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.skipif(_CHROMIUM is None, reason="needs Debian's chromium")
def test_the_page_in_a_browser(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost], tmp_path: Path
) -> None:
    running = start_server(make_engine(quality="fast", force_approx=True))
    documents = [f"Document {n}: " + "what was read once need not be read again. " * (n + 2) for n in range(4)]
    with running.openai("no key is needed") as client:
        for number in range(14):
            chosen = [documents[number % 4], documents[(number * 2 + 1) % 4]]
            parts = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in chosen]
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": [*parts, {"type": "text", "text": f"Question {number}?"}]}],  # type: ignore[list-item, misc]
                max_tokens=3 + number % 5,
            )
    picture = tmp_path / "page.png"
    page = _browse(running.url + "/", tmp_path, picture=picture)
    assert picture.stat().st_size > 20_000
    assert ">live<" in page
    assert re.search(r'id="rate">\d+\.\d %<', page)
    assert re.search(r'id="ttft">[\d.]+ m?s<', page)
    assert page.count('class="bar"') == 14
    for kind in ("exact", "moved", "recomputed", "fresh"):
        assert f'<i class="{kind}" style="flex' in page, kind
    assert ">memory<" in page
    assert "<th>uses</th>" in page
    if kept := os.environ.get("KVBOOST_KEEP_SCREENSHOT"):
        shutil.copy(picture, kept)


@pytest.mark.skipif(_CHROMIUM is None, reason="needs Debian's chromium")
def test_the_page_without_a_key_is_locked(keyed: Running, tmp_path: Path) -> None:
    page = _browse(keyed.url + "/", tmp_path)
    assert ">locked<" in page
    assert re.search(r'id="numbers" hidden', page)
    assert not re.search(r'id="locked" hidden', page)
