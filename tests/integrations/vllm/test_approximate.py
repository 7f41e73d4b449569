"""Approximate reuse in vLLM: found anywhere, close to the full reading, and never mixed with exact KV."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.integrations.vllm.conftest import engine as start

_DOCUMENTS = [
    "The lighthouse of Brunn was built in 1871 by the engineer Ada Kern. It stands on a rock two miles from the "
    "shore, and its lamp was lit with whale oil until 1904, when the harbour got its first power station.\n\n",
    "Copper melts at 1085 degrees. It is soft, conducts heat and electricity well, and forms a green layer in rain. "
    "Roofs of churches were made of it because they last for more than two hundred years.\n\n",
    "The river Tave rises in the Ode hills, passes four mills and a paper factory, and reaches the sea at Lurn. In "
    "dry summers children walk across it near the old bridge of Hask.\n\n",
    "Bread is made of flour, water, salt and yeast. The dough rests for three hours, is folded twice, and is baked at "
    "230 degrees for forty minutes with some steam in the first ten.\n\n",
]


@pytest.fixture
def prompts(model: Path) -> tuple[list[int], list[int]]:
    """Four documents, and the same in another order behind another preamble."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    question = "Question: who built the lighthouse of Brunn? Answer:"
    first = "Read these texts.\n\n" + "".join(_DOCUMENTS) + question
    other = "You are a careful reader. Some texts follow.\n\n" + "".join(_DOCUMENTS[i] for i in (2, 0, 3, 1)) + question
    return tokenizer.encode(first), tokenizer.encode(other)


def _kl(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Over the likeliest tokens that both report, in the first step."""
    a, b = one["logprobs"][0], other["logprobs"][0]
    return sum(math.exp(a[token]) * (a[token] - b[token]) for token in a.keys() & b.keys())


def test_documents_are_found_behind_other_text(model: Path, prompts: tuple[list[int], list[int]]) -> None:
    first, other = prompts
    with start(model, connector={"mode": "approximate", "chunk_size": 16}) as engine:
        engine.generate(first)
        (found,) = engine.generate(other)
        engine.forget()
        (full,) = engine.generate(other, params={"kvboost": "off"})
        assert "could not be" not in engine.log(), "what fails is computed, and would look right"
        everything = engine.ask(do="generate", prompts=[other], params={"kvboost": "exact"})[0]
    assert found["cached"] > 0.85 * len(other)
    assert found["tokens"][0] == full["tokens"][0]
    assert abs(_kl(full, found)) < 0.1
    assert full["cached"] == 0
    assert everything["tokens"] == full["tokens"]


@pytest.mark.parametrize("seed", ["", "shared pages"])
def test_approximate_pages_are_served_to_nobody(model: Path, prompts: tuple[list[int], list[int]], seed: str) -> None:
    """vLLM's own prefix cache is on: without names of their own, such pages are served as exact."""
    first, other = prompts
    with start(model, connector={"chunk_size": 16}, seed=seed) as engine:
        engine.generate(first)
        engine.generate(other, params={"kvboost": "approximate"}, new=40)
        (exact,) = engine.generate(other, new=40)
        engine.forget()
        (clean,) = engine.generate(other, new=40, params={"kvboost": "off"})
        assert "could not be" not in engine.log()
    if seed:
        assert exact["cached"] > 0.5 * len(other)
    else:
        assert exact["cached"] <= 32, "only what both prompts begin with"
        assert exact["logprobs"] == clean["logprobs"]


def test_nothing_recomputed_some_and_everything(model: Path, prompts: tuple[list[int], list[int]]) -> None:
    """With all moved positions recomputed, what comes out is the full reading's, up to rounding."""
    first, other = prompts
    answers = {}
    for ratio in (0.0, 0.15, 1.0):
        with start(model, connector={"mode": "approximate", "recompute_ratio": ratio, "chunk_size": 16}) as engine:
            engine.generate(first)
            (answers[ratio],) = engine.generate(other)
            engine.forget()
            (full,) = engine.generate(other, params={"kvboost": "off"})
            assert "could not be" not in engine.log()
    assert abs(_kl(full, answers[1.0])) < 1e-3
    assert 1e-3 <= abs(_kl(full, answers[0.15])) < abs(_kl(full, answers[0.0]))
