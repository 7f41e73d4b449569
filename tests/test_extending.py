"""The extensions of docs/extending.md pass their suites, are used by an engine, and are as short as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer
from tests.test_contracts import broken_rules

_PAGE = (Path(__file__).resolve().parents[1] / "docs" / "extending.md").read_text()
_CODE = "\n".join(re.findall(r"^```python\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=260, max_position_embeddings=4096).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    made: dict[str, Any] = {"__name__": "page"}
    exec(compile(_CODE.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(folder)), "extending.md", "exec"), made)
    return made


@pytest.mark.parametrize("suite", ["TestDictTier", "TestLargestFirst"])
def test_an_extension_of_the_page_passes_its_suite(names: dict[str, Any], suite: str) -> None:
    assert broken_rules(names[suite]()) == set()


def test_the_strategy_of_the_page_repairs(names: dict[str, Any]) -> None:
    reuse = names["answer"].reuse
    assert reuse.approximate == "both-ends"
    assert reuse.moved_tokens > 100
    assert 0.1 < reuse.recomputed_tokens / reuse.moved_tokens < 0.3
    assert not reuse.bitwise


@pytest.mark.parametrize("name", ["DictTier", "LargestFirst", "BothEnds"])
def test_it_is_short(name: str) -> None:
    source = _CODE[re.search(rf"^class {name}\b", _CODE, re.MULTILINE).start() :]  # type: ignore[union-attr]
    body = re.split(r"\n(?=\S)", source, maxsplit=1)[0]
    bare = re.sub(r"^    def .*?:( \.\.\.)?$", "", body, flags=re.MULTILINE | re.DOTALL)
    assert len([line for line in bare.splitlines() if line.strip()]) <= 40
