"""Every Python block of the documents runs, or says above itself why not; those that do not are listed on one page.

The blocks of a page run in order, in one namespace, with a tiny model for the model's hub name, in a directory of their
own. README and quick start run on the trained model (``test_quickstart.py``).
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models import tiny_model
from tests.helpers.serving import tiny_adapter
from tests.helpers.tokenizer import byte_tokenizer
from tests.test_quickstart import SERVED_PAGES

_ROOT = Path(__file__).resolve().parents[1]
_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SERVED = "http://127.0.0.1:8000"
_ELSEWHERE = {"README.md", "docs/quickstart.md"}
_BLOCK = re.compile(
    r"(?:^\*Not run by the tests: (?P<reason>[^*]+)\.\*\n\n)?^ *```python\n(?P<code>.*?)^ *```", re.M | re.S
)
_SETUP = {
    "docs/prompts.md": """
from kvboost import KVBoost
engine = KVBoost.from_pretrained("MODEL")
system_prompt, passages, now, question = "Answer.\\n", ["one passage\\n\\n", "another one\\n\\n"], "noon", "why?"
""",
    "docs/decisions/0017-paging.md": """
from kvboost import KVBoost
model, prompt = "MODEL", "a text " * 40
""",
}
"""What a page takes as given."""
_TEXTS = [("docs/decisions/0017-paging.md", '"/disk"', '"."')]
"""What stands for something else here: (page, text, its stand-in)."""


@dataclass(frozen=True)
class Block:
    """Code of a page."""

    page: str
    code: str
    reason: str | None
    """Why it is not run."""

    @property
    def is_served(self) -> bool:
        return _SERVED in self.code


def _blocks() -> list[Block]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=_ROOT, capture_output=True, text=True, check=False)
    pages = listed.stdout.split() or [str(path.relative_to(_ROOT)) for path in _ROOT.rglob("*.md")]
    return [
        Block(page, found["code"], found["reason"])
        for page in sorted(pages)
        for found in _BLOCK.finditer((_ROOT / page).read_text())
    ]


_ALL = _blocks()
_RUN = [block for block in _ALL if block.reason is None and not block.is_served and block.page not in _ELSEWHERE]


def _code(page: str) -> str:
    return "\n".join(block.code for block in _RUN if block.page == page)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=260, max_position_embeddings=16384).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("page", sorted({block.page for block in _RUN}))
def test_the_code_of_a_page_runs(
    page: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "LICENSE").write_text((_ROOT / "LICENSE").read_text())
    if "my-adapter" in _code(page):
        tiny_adapter(tmp_path / "my-adapter")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(_ROOT / "examples/fleet")  # ``docs/fleet.md`` has a file of it copied
    code = (_SETUP.get(page, "") + _code(page)).replace(_MODEL, "MODEL").replace("MODEL", str(model_folder))
    for where, text, stand_in in _TEXTS:
        code = code.replace(text, stand_in) if where == page else code
    names: dict[str, Any] = {"__name__": "page"}
    try:
        exec(compile(code, page, "exec"), names)
    finally:
        for value in names.values():
            if type(value).__module__.startswith(("kvboost", "subscriber")) and hasattr(value, "close"):
                value.close()


def test_code_that_needs_a_server_is_run_where_one_runs() -> None:
    """``test_quickstart.py`` has one; it runs the clients of these pages."""
    assert {block.page for block in _ALL if block.is_served and block.reason is None} == set(SERVED_PAGES)


def test_what_is_not_run_is_listed_with_its_reason() -> None:
    """On the page of promises: page, number of blocks, reason."""
    counts: dict[tuple[str, str], int] = {}
    for block in _ALL:
        if block.reason is not None:
            counts[block.page, block.reason] = counts.get((block.page, block.reason), 0) + 1
    rows = re.findall(r"^\| `([^`]+\.md)` \| (\d+) \| ([^|]+) \|$", (_ROOT / "docs/promises.md").read_text(), re.M)
    assert {(page, reason): int(number) for page, number, reason in rows} == counts


def test_no_block_escapes() -> None:
    """Every fence that begins Python is one of the blocks."""
    for page in {block.page for block in _ALL}:
        fences = re.findall(r"^ *```python", (_ROOT / page).read_text(), re.M)
        assert len(fences) == len([block for block in _ALL if block.page == page]), page
