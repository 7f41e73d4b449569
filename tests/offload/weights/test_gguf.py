"""GGUF files with a weight budget: loaded whole by Transformers once, then streamed with the same bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.hf.weights import streamed_weights_of
from kvboost.offload.weights import load
from tests.helpers.files import same_times
from tests.helpers.models import smollm2_gguf


def test_another_file_with_the_same_times_has_slabs_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same_times(monkeypatch)
    keys = []
    for number in (1, 2):
        file = tmp_path / "model.gguf"
        file.write_bytes(b"GGUF" + bytes([number]) * 3_000_000)
        keys.append(load._key([file], None))
    assert keys[0] != keys[1] == load._key([file], None)


@pytest.mark.real
def test_a_gguf_file_is_streamed(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the gguf package's own, where bytes become numbers
        source = smollm2_gguf()
        prompt = [(i * 37) % 900 + 30 for i in range(40)]
        found: list[Any] = []
        for budget in (None, "250MB"):
            with KVBoost.from_pretrained(
                str(source.parent),
                gguf_file=source.name,
                dtype="float32",
                device="cpu",
                weight_budget=budget,
                weight_dir=tmp_path if budget else None,
                chunk_size=16,
            ) as engine:
                assert (streamed_weights_of(engine.model) is not None) == (budget is not None)
                assert engine.tokenizer.decode(engine.encode("Hello there")) == "Hello there"
                cold, warm = engine.prefill(prompt), engine.prefill(prompt)
                assert warm.reuse.exact_tokens > 0
                assert torch.equal(cold.logits, warm.logits)
                assert engine.parts is not None
                found.append((cold.logits, engine.session.prefiller.keys.snapshot().root))
        assert torch.equal(found[0][0], found[1][0])
        assert found[0][1] == found[1][1]
