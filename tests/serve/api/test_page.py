from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from kvboost import KVBoost
from tests.serve.conftest import Running

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_KINDS = ("exact", "moved", "recomputed", "fresh")


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
    for kind in _KINDS:
        assert f'<i class="{kind}" style="flex' in page, kind
    standing = re.search(r'id="standing"([^>]*)>Non-prefix reuse is on; 0 answers checked since, 0 differed<', page)
    assert standing is not None
    assert "hidden" not in standing[1]
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


class _Tab:
    """A page in a browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        self._connection.send(json.dumps({"id": 1, "method": method, "params": params}))
        answer: dict[str, Any] = json.loads(self._connection.recv(timeout=60))["result"]
        assert "exceptionDetails" not in answer, answer
        return answer

    def run(self, script: str) -> Any:
        """What JavaScript gives there."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return found["result"].get("value")

    def colour_scheme(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def resize(self, width: int) -> None:
        """As wide as a phone, or as a screen."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)


@contextmanager
def _opened(url: str, folder: Path) -> Iterator[_Tab]:
    assert _CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [_CHROMIUM, *options, f"--user-data-dir={folder / 'driven'}", url],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = folder / "driven" / "DevToolsActivePort"
        _until(lambda: port.exists() and len(port.read_text().split()) == 2)
        found = httpx.get(f"http://127.0.0.1:{port.read_text().split()[0]}/json").json()
        [target] = [entry["webSocketDebuggerUrl"] for entry in found if entry["type"] == "page"]
        with connect(target, max_size=None) as connection:
            yield _Tab(connection)
    finally:
        process.kill()
        process.wait()


def _until(holds: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.skipif(_CHROMIUM is None, reason="needs Debian's chromium")
def test_a_prompt_sent_from_the_page_is_coloured_by_what_was_reused(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost], tmp_path: Path
) -> None:
    running = start_server(make_engine())
    text = "What was read once need not be read again. " * 4
    with _opened(running.url + "/", tmp_path) as tab:
        run = tab.run
        _until(lambda: run("document.getElementById('state')?.textContent") == "live")

        def ask(prompt: str) -> list[list[str]]:
            run(f"$('prompt').value = {json.dumps(prompt)}; $('length').value = 5; $('ask').requestSubmit()")
            _until(lambda: not run("$('send').disabled"))
            found: list[list[str]] = run("[...$('asked').children].map(run => [run.className, run.textContent])")
            return found

        assert ask(text + "First?") == [["fresh", text + "First?"]]
        assert run("$('answer').textContent")
        (exact, again), (fresh, rest) = ask(text + "Second?")
        assert (exact, fresh, again + rest) == ("exact", "fresh", text + "Second?")
        assert len(again) >= len(text) - 40
        assert f"{len(again)} of {len(text) + 7} prompt tokens reused" in run("$('outcome').textContent")
        asked = "performance.getEntriesByType('resource').filter(entry => entry.name.endsWith('/detokenize')).length"
        assert run(asked) == 2, "one request for all segments of a prompt"
        assert "not coloured" in run("drawAsked('abcdef', [['exact', 2]])"), "more segments than the server names"
        assert run("[...$('asked').children].map(run => [run.className, run.textContent])") == [
            ["exact", "ab"],
            ["", "cdef"],
        ]
        for scheme in ("light", "dark"):
            tab.colour_scheme(scheme)
            assert len(set(_drawn_kinds(tab))) == len(_KINDS), f"each kind has colours of its own in {scheme}"
        assert run("$('length').labels[0].textContent.trim()") == "New tokens, at most"
        run("$('length').value = 0; $('ask').requestSubmit()")
        _until(lambda: "max_tokens" in run("$('outcome').textContent") or not run("$('ask').checkValidity()"))
        ask(text + "Third?")
        _until(lambda: run("$('requests').querySelectorAll('.bar').length") == 3)
        for width, scheme in product((1400, 390), ("light", "dark")):
            tab.resize(width)
            tab.colour_scheme(scheme)
            assert run("document.documentElement.scrollWidth") <= width, "nobody scrolls sideways"
            if kept := os.environ.get("KVBOOST_KEEP_SCREENSHOT"):
                Path(f"{kept}.{width}.{scheme}.png").write_bytes(b64decode(tab.call("Page.captureScreenshot")["data"]))
        assert run("$('standing').hidden"), "exact, so there is nothing to tell"
        reuse = {"allowed": False, "reason": "exact only: 3 of about 140 checks done", "checked": 3, "differing": 0}
        assert (
            run(f"""fetch('/v1/cache').then(answer => answer.json()).then(cache => {{
            draw({{...cache, cache: {{...cache.cache, non_prefix_reuse: {json.dumps(reuse)}}}}}, {{}});
            return $('standing').textContent;
        }})""")
            == "Non-prefix reuse is off: exact only: 3 of about 140 checks done"
        )
        tier = {"available": True, "errors": 2, "writes_dropped": 0, "loads": 4, "load_ms": 12.3, "hit_rate": 0.75}
        told = run(f"""fetch('/v1/cache').then(answer => answer.json()).then(cache => {{
            draw({{...cache, tiers: {{memory: {json.dumps(tier)}}}}}, {{}});
            return $('tiers').firstChild.textContent;
        }})""")
        for what in ("memory", "2 errors", "12 ms per load", "75 % of chunks found there"):
            assert what in told


def _drawn_kinds(tab: _Tab) -> list[tuple[str, str]]:
    """The colours of a prompt's tokens and of the lines below them, one for each kind."""
    tab.run(f"drawAsked('abcdefgh', {json.dumps([[kind, 2] for kind in _KINDS])})")
    found = tab.run("""[...$('asked').children].map(run => {
        const style = getComputedStyle(run);
        return [run.className, style.backgroundColor, style.color, style.borderBottomColor];
    })""")
    transparent = "rgba(0, 0, 0, 0)"
    for kind, background, _, line in found:
        assert background == transparent, f"{kind} is text, not a bar"
        assert line != transparent, kind
    return [(colour, line) for _, _, colour, line in found]
