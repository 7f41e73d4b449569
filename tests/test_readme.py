"""The README's code runs as printed; only the model's hub name is replaced by the folder made from its package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.real
def test_the_readme_runs(smollm2_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (_ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    (tmp_path / "LICENSE").write_text((_ROOT / "LICENSE").read_text())
    monkeypatch.chdir(tmp_path)  # it writes a cache where it runs
    code = "\n".join(blocks).replace("HuggingFaceTB/SmolLM2-135M-Instruct", smollm2_path)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert len(capsys.readouterr().out) > 20
    assert names["r"].cached_tokens > 100
    assert names["r"].reuse.bitwise
