"""The engine over streamed weights: reuse, batches and threads as with weights in memory, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.errors import ConfigError
from kvboost.hf.weights import streamed_weights_of
from kvboost.store import MemoryStore
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

_PROMPT = [(i * 37) % 90 + 3 for i in range(100)]
_SETTINGS: dict[str, Any] = {"chunk_size": 16, "chunking": "fixed"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=6).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def both(folder: Path) -> Iterator[tuple[KVBoost, KVBoost]]:
    resident = KVBoost.from_pretrained(str(folder), **_SETTINGS)
    with resident, KVBoost.from_pretrained(str(folder), weight_budget="500kB", **_SETTINGS) as streamed:
        streamer = streamed_weights_of(streamed.model)
        assert streamer is not None
        assert streamer.memory.in_memory <= 500_000
        yield resident, streamed


def test_answers_are_the_same_to_the_bit_cold_and_warm(both: tuple[KVBoost, KVBoost]) -> None:
    resident, streamed = both
    for exact in (0, 99):
        one, other = resident.prefill(_PROMPT), streamed.prefill(_PROMPT)
        assert one.reuse.exact_tokens == other.reuse.exact_tokens == exact
        assert torch.equal(one.logits, other.logits)
    assert streamed.verify_correctness()
    arguments: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0}
    assert streamed.generate(_PROMPT, **arguments).token_ids == resident.generate(_PROMPT, **arguments).token_ids
    prompts = [_PROMPT[:50], [*_PROMPT[:50], 5, 6, 7], _PROMPT[20:60]]
    batches = [engine.generate_batch(prompts, **arguments) for engine in both]
    assert [r.token_ids for r in batches[0]] == [r.token_ids for r in batches[1]]


def test_chunks_of_a_resident_engine_serve_a_streamed_one_and_the_other_way_round(folder: Path) -> None:
    store = MemoryStore(10**8)
    with (
        KVBoost.from_pretrained(str(folder), store=store, **_SETTINGS) as resident,
        KVBoost.from_pretrained(str(folder), store=store, weight_budget="500kB", **_SETTINGS) as streamed,
    ):
        cold = resident.prefill(_PROMPT)
        warm = streamed.prefill(_PROMPT)
        assert warm.reuse.exact_tokens == 99
        assert torch.equal(warm.logits, cold.logits)
        streamed.warm(_PROMPT[::-1])
        assert resident.prefill(_PROMPT[::-1]).reuse.exact_tokens == 99


def test_text_that_stands_elsewhere_is_moved_and_repaired_alike(folder: Path) -> None:
    logits = []
    for budget in (None, "500kB"):
        arguments = {**_SETTINGS, "quality": "high", "force_approx": True, "recompute_strategy": "auto"}
        with KVBoost.from_pretrained(str(folder), weight_budget=budget, **arguments) as engine:
            engine.warm(_PROMPT[:64], boundaries=[64])
            result = engine.prefill([*range(5, 37), *_PROMPT[:64], 8, 9], boundaries=[32, 96])
            assert result.reuse.moved_tokens == 64
            logits.append(result.logits)
    assert torch.equal(*logits)


def test_threads_share_a_streamed_engine(both: tuple[KVBoost, KVBoost]) -> None:
    resident, streamed = both
    prompts = [_PROMPT[i : i + 60] for i in range(6)]
    expected = [resident.prefill(prompt).logits for prompt in prompts]
    found: dict[int, torch.Tensor] = {}

    def run(index: int) -> None:
        found[index] = streamed.prefill(prompts[index]).logits

    threads = [threading.Thread(target=run, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[index], logits) for index, logits in enumerate(expected))


def test_a_budget_for_everything_streams_nothing(folder: Path) -> None:
    with KVBoost.from_pretrained(str(folder), weight_budget="1GB", **_SETTINGS) as engine:
        assert streamed_weights_of(engine.model) is None
        assert "streamed" not in engine.describe()["weights"]


def test_the_engine_says_what_it_streams(both: tuple[KVBoost, KVBoost]) -> None:
    _, streamed = both
    assert streamed.describe()["weights"].startswith("streamed: ")


@pytest.mark.parametrize("budget", ["much", "-1", "10kB"])
def test_a_budget_that_cannot_work_says_so(folder: Path, budget: str) -> None:
    with pytest.raises(ConfigError, match="weight_budget="):
        KVBoost.from_pretrained(str(folder), weight_budget=budget)


def test_a_device_with_one_queue_streams_no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS has no second stream to copy on."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    with pytest.raises(ConfigError, match="which mps has not; give device='cpu'"):
        KVBoost.from_pretrained(str(folder), weight_budget="500kB", device="mps")
