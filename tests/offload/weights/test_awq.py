from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvboost import KVBoost
from kvboost.errors import ConfigError
from kvboost.hf.checkpoint import Shards
from kvboost.offload.weights import awq as module
from kvboost.offload.weights.awq import AwqWeights, Int4Linear
from kvboost.offload.weights.streamer import streamer_of
from tests.helpers.awq import quantise, save_awq
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

_PROMPT = [(i * 37) % 90 + 3 for i in range(60)]
_SETTINGS = {"quant_method": "awq", "bits": 4, "version": "gemm"}


def _layer(folder: Path, weight: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[Int4Linear, torch.Tensor]:
    """A layer as it comes out of an AWQ checkpoint, and the weights that stands for."""
    stored, meant = quantise(weight, group)
    save_file({f"m.0.{name}": tensor for name, tensor in stored.items()}, folder / "model.safetensors")
    weights = AwqWeights(Shards([folder / "model.safetensors"]), {**_SETTINGS, "group_size": group})
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], dtype=dtype)
    model = torch.nn.ModuleDict({"m": torch.nn.ModuleList([linear])})
    weights.prepare(model)
    layer = model["m"][0]  # type: ignore[index]
    assert isinstance(layer, Int4Linear)
    for key in ("packed", "scales_and_zeros"):
        assert weights.holds(f"m.0.{key}")
        empty = layer._parameters[key]
        assert empty is not None
        data = bytearray(b"".join(weights.pieces(f"m.0.{key}", empty.dtype)))
        tensor = torch.frombuffer(data, dtype=empty.dtype).view(empty.shape)
        layer._parameters[key] = torch.nn.Parameter(tensor, requires_grad=False)
    return layer, meant


@given(
    outputs=st.sampled_from([16, 64, 192]),
    groups=st.integers(1, 3),
    group=st.sampled_from([32, 64, 128]),
    rows=st.sampled_from([1, 16, 17, 40]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
@torch.no_grad()
def test_few_rows_and_many_compute_what_the_checkpoint_means(
    tmp_path_factory: pytest.TempPathFactory, outputs: int, groups: int, group: int, rows: int, seed: int
) -> None:
    torch.manual_seed(seed)
    folder = tmp_path_factory.mktemp("awq")
    layer, meant = _layer(folder, torch.randn(outputs, groups * group), group, torch.float32)
    inputs = torch.randn(rows, groups * group)
    expected = torch.nn.functional.linear(inputs, meant, layer.bias)
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(layer.dequantised(), meant, rtol=1e-4, atol=1e-4)


def test_a_machine_that_packs_otherwise_gets_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, meant = _layer(tmp_path, torch.randn(64, 128), 64, torch.float32)
    monkeypatch.setattr(module, "_layout_is_known", lambda outputs: False)
    torch.testing.assert_close(layer.dequantised(), meant, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An AWQ checkpoint, and the model of the numbers it means."""
    folder = tmp_path_factory.mktemp("awq")
    model = tiny_model("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=5)
    save_awq(model, folder, group=32)
    byte_tokenizer().save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("budget", ["170kB", "1GB"])
@torch.no_grad()
def test_an_awq_checkpoint_loads_streams_and_matches_its_reference(awq: tuple[Path, Any], budget: str) -> None:
    folder, reference = awq
    with KVBoost.from_pretrained(str(folder), device="cpu", weight_budget=budget, chunk_size=16) as engine:
        assert (streamer_of(engine.model) is not None) == (budget == "170kB")
        for prompt in (_PROMPT, _PROMPT[:9]):  # rows above and below the kernel's limit
            expected = reference(torch.tensor([prompt])).logits[0, -1]
            found = engine.prefill(prompt).logits
            assert (found - expected).norm() / expected.norm() < 1e-3
        assert engine.verify_correctness()
        assert len(engine.generate(_PROMPT, max_new_tokens=5, temperature=0).token_ids) == 5


@torch.no_grad()
def test_streamed_and_resident_awq_agree_to_the_bit(awq: tuple[Path, Any]) -> None:
    logits = []
    for budget in ("170kB", "1GB"):
        with KVBoost.from_pretrained(str(awq[0]), device="cpu", weight_budget=budget, chunk_size=16) as engine:
            logits.append(engine.prefill(_PROMPT).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("wrong", [{"bits": 8}, {"quant_method": "gptq"}, {"group_size": 48}, {"version": "gemv"}])
def test_other_quantisation_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    save_file({"a.qweight": torch.zeros(8, 1, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="of quantised checkpoints weight_budget takes AWQ"):
        AwqWeights(Shards([tmp_path / "model.safetensors"]), {**_SETTINGS, "group_size": 64, **wrong})
