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


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far the log-probabilities of the first step's two likeliest tokens are apart; infinite if they are others."""
    a, b = one["logprobs"][0], other["logprobs"][0]
    return max(abs(a[token] - b[token]) for token in a) if a.keys() == b.keys() else math.inf


def test_documents_are_found_behind_other_text(model: Path, prompts: tuple[list[int], list[int]]) -> None:
    first, other = prompts
    with start(model, connector={"mode": "approximate", "chunk_size": 16}) as engine:
        engine.generate(first)
        (found,) = engine.generate(other)
        engine.forget()
        (full,) = engine.generate(other, params={"kvboost": "off"})
        assert "could not be" not in engine.log(), "what fails is computed, and would look right"
        counts = engine.counts()
    assert found["cached"] > 0.85 * len(other)
    assert counts["moved_tokens"] + counts["recomputed_tokens"] > 0.8 * len(other), "found, and not only claimed"
    assert found["tokens"][0] == full["tokens"][0]
    assert _apart(full, found) < 0.5
    assert full["cached"] == 0


@pytest.mark.parametrize("seed", ["", "salt ignored"])
def test_a_salt_keeps_texts_apart_wherever_they_stand(
    model: Path, prompts: tuple[list[int], list[int]], seed: str
) -> None:
    first, other = prompts
    with start(model, connector={"mode": "approximate", "chunk_size": 16}, seed=seed) as engine:
        engine.generate(first, salt="alice")
        (found,) = engine.generate(other, salt="bob")
    assert (found["cached"] == 0) is (seed == "")


@pytest.mark.parametrize("seed", ["", "shared pages", "approximate KV is kept"])
def test_approximate_pages_are_served_to_nobody(model: Path, prompts: tuple[list[int], list[int]], seed: str) -> None:
    """vLLM's own prefix cache is on: without names of their own, such pages are served as exact."""
    first, other = prompts
    with start(model, connector={"chunk_size": 16}, seed=seed) as engine:
        engine.generate(first)
        (said,) = engine.generate(other, params={"kvboost": "approximate"}, new=72)
        longer = [*other, *said["tokens"]]  # its last pages were decoded behind approximate KV
        (behind,) = engine.generate(longer)
        (exact,) = engine.generate(other, new=40)
        engine.forget()
        (clean,) = engine.generate(other, new=40, params={"kvboost": "off"})
        assert "could not be" not in engine.log()
    if seed:
        assert behind["cached"] > len(other)
    else:
        assert behind["cached"] <= 32, "only what both prompts begin with"
        assert _apart(clean, exact) < 1e-3


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
    assert _apart(full, answers[1.0]) < 1e-3
    for ratio in (0.0, 0.15):  # which of them is nearer is a question for many prompts: the yardstick's
        assert 1e-3 <= _apart(full, answers[ratio]) < 0.5
