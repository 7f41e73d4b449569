"""Quantised models as people load them: served with equal bits, and no two of them share a key."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from kvboost import KVBoost
from kvboost.cli import main
from kvboost.core.verify import same_bits
from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.packed_weights import packed
from kvboost.hf.weights import weights_of
from tests.helpers.awq import save_awq
from tests.helpers.models import tiny_model
from tests.helpers.quantised import save_compressed, save_compressed_int4, save_fp8, save_gptq
from tests.helpers.tokenizer import byte_tokenizer

_SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 300, "max_position_embeddings": 1024}
_PROMPT = [(i * 37) % 200 + 20 for i in range(300)]
_BRANCH = [*_PROMPT[:170], *((i * 11) % 200 + 20 for i in range(130))]

Load = Callable[[Any, Path], Any]


def _model(*, factor: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Any:
    """With another power of two for a factor one layer has the same packed numbers, and other scales alone."""
    model = tiny_model("llama", dtype=dtype, **_SIZES)
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(factor)
    return model


def _loaded(folder: Path, **arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries: kernels that need a GPU, types that are cast
        return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.bfloat16, **arguments}).eval()


def _bitsandbytes(**settings: Any) -> Load:
    def load(model: Any, folder: Path) -> Any:
        pytest.importorskip("bitsandbytes")
        model.save_pretrained(folder)
        return _loaded(folder, quantization_config=BitsAndBytesConfig(**settings))

    return load


def _torchao(name: str, **settings: Any) -> Load:
    def load(model: Any, folder: Path) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantization = pytest.importorskip("torchao.quantization")
            from transformers import TorchAoConfig
        model.save_pretrained(folder)
        return _loaded(folder, quantization_config=TorchAoConfig(getattr(quantization, name)(**settings)))

    return load


def _torchao_by_hand(model: Any, _: Path) -> Any:
    """Without a config that says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    return model


def _hqq_by_hand(model: Any, _: Path) -> Any:
    """As HQQ does; Transformers 5.23 does not load it."""
    quantize = pytest.importorskip("hqq.core.quantize")
    settings = quantize.BaseQuantizeConfig(nbits=4, group_size=64)
    for name, layer in list(model.model.layers.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            parent, _, own = name.rpartition(".")
            made = quantize.HQQLinear(layer, settings, compute_dtype=torch.bfloat16, device="cpu")
            setattr(model.model.layers.get_submodule(parent), own, made)
    return model


def _quanto(weights: str) -> Load:
    def load(model: Any, folder: Path) -> Any:
        pytest.importorskip("optimum.quanto")
        from transformers import QuantoConfig

        model.save_pretrained(folder)
        return _loaded(folder, quantization_config=QuantoConfig(weights=weights))

    return load


def _compressed(save: Callable[..., None], **settings: Any) -> Load:
    def load(model: Any, folder: Path) -> Any:
        pytest.importorskip("compressed_tensors")
        save(model, folder, **settings)
        return _loaded(folder)

    return load


def _unpacked(model: Any, folder: Path) -> Any:
    pytest.importorskip("compressed_tensors")
    if transformers.__version__.startswith("5.16."):
        pytest.skip("this version keeps the forward that packs activations")
    from transformers import CompressedTensorsConfig

    save_compressed(model, folder)
    return _loaded(folder, quantization_config=CompressedTensorsConfig(dequantize=True))


def _gptqmodel(save: Callable[..., None]) -> Load:
    def load(model: Any, folder: Path) -> Any:
        pytest.importorskip("gptqmodel")
        save(model.half(), folder, group=64)
        return _loaded(folder, dtype=torch.float16)

    return load


def _fp8(model: Any, folder: Path) -> Any:
    if transformers.__version__.startswith("5.16."):
        pytest.skip(
            "this version cannot load FP8 Llamas: it takes their plan for several GPUs, which is None, for a dict"
        )
    save_fp8(model, folder)
    return _loaded(folder)


PACKED: dict[str, Load] = {
    "torchao int8": _torchao("Int8WeightOnlyConfig"),
    "torchao int8 with int8 activations": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao int4": _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao float8": _torchao("Float8WeightOnlyConfig"),
    "torchao by hand": _torchao_by_hand,
    "bitsandbytes int8": _bitsandbytes(load_in_8bit=True),
    "bitsandbytes nf4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes fp4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bitsandbytes nf4 twice": _bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "quanto int8": _quanto("int8"),
    "quanto int4": _quanto("int4"),
    "hqq by hand": _hqq_by_hand,
    "compressed-tensors int4": _compressed(save_compressed_int4),
    "compressed-tensors int8 with int8 activations": _compressed(save_compressed),
    "gptq": _gptqmodel(save_gptq),
    "awq": _gptqmodel(save_awq),
}
"""Served on a grid: no test can show how their kernels round."""
UNPACKED: dict[str, Load] = {"fp8 blocks": _fp8, "compressed-tensors unpacked": _unpacked}
"""Unpacked at loading: FP8 where there is no GPU."""
FORMATS = {**PACKED, **UNPACKED}

formats = pytest.mark.parametrize("name", FORMATS)


def _weights(model: Any) -> dict[str, str]:
    return dict(ModelIdentity(model).snapshot().fields)


@formats
@pytest.mark.filterwarnings("ignore")
def test_a_warm_prompt_has_the_bits_of_a_cold_one(name: str, tmp_path: Path) -> None:
    model = FORMATS[name](_model(), tmp_path)
    settings: dict[str, Any] = {"chunk_size": 16, "quality": "exact"}
    with KVBoost(model, None, **settings) as warm, KVBoost(model, None, **settings) as cold:
        grid = warm.session.prefiller.rule.grid
        assert grid == (128 if name in PACKED else None)
        first, again, branch = warm.prefill(_PROMPT), warm.prefill(_PROMPT), warm.prefill(_BRANCH)
        assert again.reuse.exact_tokens == (256 if grid else 299)
        assert branch.reuse.exact_tokens == (128 if grid else 166)
        assert again.reuse.bitwise
        assert same_bits(first.logits, again.logits)
        expected = cold.prefill(_BRANCH)
        assert expected.reuse.exact_tokens == 0
        assert same_bits(branch.logits, expected.logits)
        for one, other in zip(branch.cache.extract(0, 300), expected.cache.extract(0, 300), strict=True):
            assert same_bits(one, other)
        wanted: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0}
        cold.clear()
        assert warm.generate(_PROMPT, **wanted).token_ids == cold.generate(_PROMPT, **wanted).token_ids


@formats
@pytest.mark.filterwarnings("ignore")
def test_other_scales_of_the_same_numbers_are_another_model(name: str, tmp_path: Path) -> None:
    one, same, other = (
        FORMATS[name](_model(factor=factor), tmp_path / str(number)) for number, factor in enumerate((1.0, 1.0, 2.0))
    )
    before = _weights(one)
    with torch.no_grad():
        for model in (one, same, other):  # libraries move what they pack when it is first used
            model(torch.tensor([_PROMPT[:20]]))
    if name not in ("gptq", "awq"):  # repacked then, which is another model, once
        assert _weights(one) == before
    assert _weights(one) == _weights(same)
    assert _weights(one)["weights"] != _weights(other)["weights"]


@pytest.mark.filterwarnings("ignore")
def test_no_two_formats_share_a_key(tmp_path: Path) -> None:
    found: dict[str, str] = {}
    for number, (name, load) in enumerate(FORMATS.items()):
        try:
            model = load(_model(), tmp_path / str(number))
        except pytest.skip.Exception:
            continue
        # By hand it is what Transformers' quantisation makes: but for the config, which is a field of its own.
        if name != "torchao by hand":
            found[name] = _weights(model)["weights"] + _weights(model)["config"]
    assert len(set(found.values())) == len(found)


def _scales_of(model: Any) -> torch.Tensor:
    projection = model.model.layers[1].self_attn.k_proj
    made_of = packed(projection, projection.weight)
    assert made_of is not None
    return next(part for part in made_of.tensors[1:] if part.is_floating_point())


@pytest.mark.parametrize("name", ["torchao int8", "bitsandbytes int8", "bitsandbytes nf4", "quanto int8"])
@pytest.mark.filterwarnings("ignore")
def test_scales_that_are_written_to_are_seen(name: str, tmp_path: Path) -> None:
    model = FORMATS[name](_model(), tmp_path)
    identity = ModelIdentity(model)
    before = identity.snapshot()
    assert identity.is_current(before)
    with torch.no_grad():
        _scales_of(model).mul_(2.0)
    assert not identity.is_current(before)
    assert identity.snapshot().fields["weights"] != before.fields["weights"]


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_take_the_memory_of_all_their_parts(tmp_path: Path) -> None:
    whole = weights_of(_model()).resident
    found = weights_of(FORMATS["torchao int8"](_model(), tmp_path)).resident
    assert found < 0.75 * whole


@pytest.mark.filterwarnings("ignore")
def test_how_activations_are_packed_is_in_the_key_without_a_config(tmp_path: Path) -> None:
    model = FORMATS["compressed-tensors int8 with int8 activations"](_model(), tmp_path)
    del model.config.quantization_config
    one = _weights(model)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_scheme.input_activations = None
    other = _weights(model)
    assert one["weights"] == other["weights"]
    assert one["config"] != other["config"]


@pytest.mark.filterwarnings("ignore")
def test_activations_that_share_a_scale_are_refused(tmp_path: Path) -> None:
    """A token's KV would depend on which tokens are computed beside it."""
    model = _compressed(save_compressed, strategy="tensor", activations="tensor")(_model(), tmp_path)
    with pytest.raises(UnsupportedModelError, match="answers differently"):
        KVBoost(model, None)


class _OneScale(torch.nn.Module):
    def __init__(self, linear: torch.nn.Linear, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("numbers", (linear.weight.detach() * 100).round().to(torch.int8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, self.get_buffer("numbers").to(rows.dtype) * self.scale)


def test_a_scale_that_is_no_tensor_is_in_the_key() -> None:
    found = []
    for scale in (0.01, 0.02, 0.01):
        model = tiny_model("llama")
        for layer in model.model.layers:
            layer.mlp.down_proj = _OneScale(layer.mlp.down_proj, scale)
        found.append(_weights(model)["config"])
    assert found[0] != found[1]
    assert found[0] == found[2]


class _Scaled(torch.nn.Parameter):
    scale: torch.Tensor


def test_weights_of_an_unknown_kind_are_refused() -> None:
    model = tiny_model("llama")
    weight = _Scaled(model.lm_head.weight.detach(), requires_grad=False)
    model.lm_head.weight = weight
    before = _weights(model)
    weight.names = "of no importance"
    assert _weights(model)["weights"] != before["weights"]
    weight.scale = torch.ones(1)
    with pytest.raises(UnsupportedModelError, match="_Scaled, which may keep more than their bytes"):
        KVBoost(model, None)


def _without(monkeypatch: pytest.MonkeyPatch, module: str, check: str) -> None:
    monkeypatch.setattr(f"transformers.quantizers.{module}.{check}", lambda *_: False)


def test_a_missing_library_is_told_and_a_weight_budget_does_not_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(monkeypatch, "quantizer_awq", "is_gptqmodel_available")
    save_awq(_model(dtype=torch.float32), tmp_path, group=32)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="requires gptqmodel"):
        KVBoost.from_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match="these are packed; leave weight_budget out"):
        KVBoost.from_pretrained(str(tmp_path), weight_budget="1GB", weight_dir=tmp_path, device="cpu")


def test_a_library_that_is_asked_for_and_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "quantizer_bnb_4bit", "is_bitsandbytes_available")
    _model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="requires bitsandbytes") as told:
        KVBoost.from_pretrained(str(tmp_path), quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert "weight_budget" not in str(told.value)


@pytest.mark.filterwarnings("ignore")
def test_the_doctor_tries_a_quantised_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _fp8(_model(), tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "passed" in told
    assert "its weights are quantised, which is not built so far" in told
