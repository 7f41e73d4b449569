"""What the workloads repeat that only the bench against rivals has, and that all of it follows from the seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench.workloads import RECIPES, TextRequest, build
from benchmarks.common.report import BenchError
from kvboost.bench import workloads
from tests.bench.test_workloads import shared
from tests.helpers.tokenizer import byte_tokenizer

TOKENS = 3000
MORE = [name for name in RECIPES if name not in workloads.RECIPES]


def made(name: str, *, seed: int = 1, data: Path | None = None) -> list[TextRequest]:
    return build(name, byte_tokenizer(), tokens=TOKENS, seed=seed, data=data)


@pytest.mark.parametrize("name", MORE)
def test_a_workload_follows_from_its_seed_and_is_about_as_long_as_asked(name: str) -> None:
    requests = made(name)
    assert requests == made(name)
    assert requests != made(name, seed=2)
    assert 0.6 * TOKENS < max(len(request.tokens) for request in requests) < 1.6 * TOKENS
    assert any(request.counts for request in requests)


@pytest.mark.parametrize("name", ["few-shot", "agent"])
def test_prompts_that_count_begin_as_an_earlier_one(name: str) -> None:
    requests = made(name)
    for number, request in enumerate(requests):
        if request.counts:
            best = max(shared(request.tokens, earlier.tokens) for earlier in requests[:number])
            assert best > 0.5 * len(request.tokens)


def test_earlier_thinking_is_stripped() -> None:
    requests = made("reasoning")
    assert "<think>" in requests[1].text
    assert "<think>" not in requests[2].text
    assert "Tool result:" in requests[2].text


def test_passages_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "questions.json"
    passages = [{"text": f"Passage {number} says so. " * 60} for number in range(6)]
    file.write_text(json.dumps([{"question": f"q{n}", "answers": [], "ctxs": passages} for n in range(4)]))
    assert "Passage 3 says so." in made("rag", data=file)[0].text + made("rag", data=file)[1].text
    file.write_text(json.dumps([{"question": "q", "answers": [], "ctxs": passages[:2]}]))
    with pytest.raises(BenchError, match="give more --data"):
        made("rag", data=file)
    for ctxs in ([{"title": "t"}] * 2, ["a", "b"]):
        file.write_text(json.dumps([{"question": "q", "answers": [], "ctxs": ctxs}]))
        with pytest.raises(BenchError, match="must be an object with text"):
            made("rag", data=file)
    file.write_text(json.dumps([{"question": "q", "answers": [], "ctxs": None}]))
    with pytest.raises(BenchError, match="must hold a list of objects"):
        made("rag", data=file)
