"""Plain Transformers against our engine on one model: the same prompts, in turn, timed to the first token."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.bench import compare as module
from kvboost.bench.compare import bench, compare, quality_settings, spread_out, take_turns
from kvboost.bench.workloads import Request
from kvboost.config import EngineConfig
from kvboost.engine import KVBoost
from kvboost.errors import CapacityError, ConfigError
from kvboost.hf.loading import ModelSource
from tests.helpers.serving import tiny_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder: Path = tiny_folder(tmp_path_factory.mktemp("bench") / "tiny-llama", max_position_embeddings=2048)
    return ModelSource(str(folder), dtype="auto")


@pytest.fixture
def engine(tiny: Any) -> Iterator[KVBoost]:
    with KVBoost(tiny("llama", max_position_embeddings=1024)) as engine:
        yield engine


def requests_of(count: int, *, fill: int = 0) -> list[Request]:
    """A head that all have, and an end of each one's own."""
    rng = random.Random(0)
    head = [rng.randrange(3, 60) for _ in range(300)]
    return [Request([*head, *(rng.randrange(3, 60) for _ in range(20))], [300], n >= fill) for n in range(count)]


def test_the_first_to_go_changes_with_every_request() -> None:
    heard: list[tuple[str, int]] = []

    def ask(name: str) -> Any:
        return lambda request: heard.append((name, request.tokens[0])) or {"tokens": request.tokens}

    answers = take_turns({name: ask(name) for name in "ab"}, [Request([n], []) for n in range(3)], lambda: None)
    assert heard == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert answers["b"] == [{"tokens": [n]} for n in range(3)]


def test_the_cold_control_is_taken_from_everywhere() -> None:
    requests = [Request([n], []) for n in range(9)]
    assert [request.tokens for request in spread_out(requests, 3)] == [[1], [4], [7]]
    assert spread_out(requests[:2], 3) == requests[:2]
    assert spread_out(requests, 0) == []


def test_both_get_the_same_prompts_and_ours_finds_what_it_has_seen(engine: KVBoost) -> None:
    pairing = compare("head", requests_of(4, fill=1), engine, new=3, cold=2)
    assert (pairing.workload, pairing.engine) == ("head", "exact")
    assert pairing.prompts == [320] * 3  # the first one only fills the cache
    assert pairing.same_answers() == (3, 3)
    assert all(own["exact"] >= 290 for own in pairing.ours)
    assert [own["exact"] for own in pairing.cold_ours] == [0, 0]
    assert [len(answer["tokens"]) for answer in (pairing.cold_theirs[0], pairing.theirs[0])] == [1, 3]
    for answer in (*pairing.theirs, *pairing.ours):
        assert 0 < answer["ttft_ms"] < answer["total_ms"]


def test_plain_is_the_models_own_generate(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = requests_of(1)
    ids = torch.tensor([request.tokens])
    expected = engine.model.generate(ids, max_new_tokens=4, do_sample=False)[0, 320:].tolist()
    monkeypatch.setattr(engine, "generate", lambda *args, **more: pytest.fail("plain went through our engine"))
    assert module._ask_plain(engine.model, request, new=4)["tokens"] == expected


def test_a_clock_stops_with_the_first_token(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = requests_of(1)
    forward = engine.model.forward

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.05)
        return forward(*args, **more)

    monkeypatch.setattr(engine.model, "forward", slow)
    answer = module._ask_plain(engine.model, request, new=4)
    assert answer["ttft_ms"] >= 50
    assert answer["total_ms"] >= answer["ttft_ms"] + 150  # three more tokens


def test_a_prompt_that_is_too_long_is_said_before_anything_is_measured(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ask_plain", lambda *args, **more: pytest.fail("plain was asked"))
    with pytest.raises((ConfigError, CapacityError), match="1100 tokens|shorten"):
        compare("long", [*requests_of(2), Request([5] * 1100, [])], engine, new=3, cold=0)


@pytest.mark.parametrize("quality", ["exact", "high", "fast", "0.1"])
def test_nothing_is_checked_while_others_are_timed(quality: str) -> None:
    assert EngineConfig(**quality_settings(quality)).checked_share == 0.0


@pytest.mark.parametrize("quality", ["auto", "best", "1.5", "1x", ""])
def test_a_quality_that_cannot_be_measured_is_refused(quality: str) -> None:
    with pytest.raises(ConfigError, match="give"):
        quality_settings(quality)


def test_a_workload_whose_text_moves_is_measured_twice(source: ModelSource) -> None:
    table, same_bits = bench(source, ["chat", "rag"], tokens=300, new=2, seed=1, quality="fast")
    assert [row[:2] for row in table.rows] == [["chat", "exact"], ["rag", "exact"], ["rag", "fast"]]
    assert table.machine.dtype == "float32"  # not auto
    assert table.notes[-1] == "A warm prefill has the bits of a cold one in 2 of 2 workloads."
    assert same_bits


def test_other_bits_fail_the_report(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVBoost, "verify_correctness", lambda self, prompt: False)
    table, same_bits = bench(source, ["random"], tokens=100, new=1, seed=1, quality="exact")
    assert not same_bits
    assert "in 0 of 1 workloads" in table.markdown()
