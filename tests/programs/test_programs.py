"""The examples with other people's programs, as they are: something is reused, and tokens are those without attach.

Each runs where its package is installed (``.ci/programs``).
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvboost
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

_PROGRAMS = Path(__file__).resolve().parents[2] / "examples" / "programs"
_NEEDS = {
    "pipeline": "transformers",
    "with_langchain": "langchain_huggingface",
    "with_outlines": "outlines",
    "with_smolagents": "smolagents",
    "with_trl": "trl",
}
Run = Callable[[str, Callable[[Any], Any]], list[Any]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=260, max_position_embeddings=16384).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a program with this ``attach``; returns its exit code, then what ``model.generate`` gave, in order."""

    def program(name: str, attach: Callable[[Any], Any]) -> list[Any]:
        given: list[Any] = []

        def attach_and_watch(model: Any) -> Any:
            found, ours = attach(model), model.generate

            @functools.wraps(ours)
            def generate(*args: Any, **kwargs: Any) -> Any:
                given.append((output := ours(*args, **kwargs)).tolist())
                return output

            model.generate = generate
            return found

        monkeypatch.setattr(kvboost, "attach", attach_and_watch)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(_PROGRAMS / f"{name}.py"), run_name="__main__")
        return [ended.value.code, *given]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", str(model_folder)])
    return program


def _nothing(model: Any) -> Any:
    stats = {"cache_hits": 0, "cache_misses": 0}
    return SimpleNamespace(engine=SimpleNamespace(cache_stats=lambda: stats))


def test_every_program_is_tested() -> None:
    assert set(_NEEDS) == {path.stem for path in _PROGRAMS.glob("*.py")}


@pytest.mark.parametrize("name", _NEEDS)
def test_a_program_gives_what_it_gives_without_attach(name: str, run: Run) -> None:
    pytest.importorskip(_NEEDS[name])
    code, *attached = run(name, kvboost.attach)
    assert code is None
    code, *plain = run(name, _nothing)
    assert code == "nothing was reused"
    assert len(plain) > 1
    assert attached == plain
    assert len(plain[0][0]) > 100
