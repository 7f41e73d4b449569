"""Tiny checkpoints as quantisation libraries write them, without their search for better scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_FP8 = torch.float8_e4m3fn


def _layers(model: Any) -> list[tuple[str, Any]]:
    return [(name, one) for name, one in model.named_modules() if ".layers." in name and hasattr(one, "in_features")]


def _save(model: Any, folder: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """``tensors`` take the place of the weights they are named after."""
    model.save_pretrained(folder)
    replaced = {f"{name}.weight" for name, _ in _layers(model)}
    kept = {name: tensor for name, tensor in model.state_dict().items() if name not in replaced}
    file = folder / "model.safetensors"
    save_file({n: t.contiguous() for n, t in (kept | tensors).items()}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def save_gptq(model: Any, folder: Path, *, group: int = 64) -> None:
    """4 bits, symmetric, in GPTQ's own layout."""
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in _layers(model):
        outputs, inputs = layer.weight.shape
        groups = layer.weight.data.float().T.reshape(-1, group, outputs)
        scales = (groups.abs().amax(1) / 7).clamp_min(1e-5).half()
        numbers = (groups / scales.float()[:, None]).round().clamp(-8, 7) + 8
        tensors[f"{name}.qweight"] = _eight_in_one(numbers.reshape(inputs, outputs), 0)
        tensors[f"{name}.qzeros"] = _eight_in_one(torch.full((inputs // group, outputs), 7), 1)  # GPTQ adds 1
        tensors[f"{name}.scales"] = scales
        tensors[f"{name}.g_idx"] = (torch.arange(inputs) // group).int()
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    _save(model, folder, {**settings, "checkpoint_format": "gptq"}, tensors)


def _eight_in_one(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    eights = numbers.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = (eights << (4 * torch.arange(8))).sum(-1)
    return (packed - (packed >= 2**31) * 2**32).int().movedim(-1, dim)


def save_fp8(model: Any, folder: Path, *, block: int = 32) -> None:
    """FP8 in square blocks with a scale each, as DeepSeek's and Qwen's checkpoints."""
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in _layers(model):
        rows, columns = (size // block for size in layer.weight.shape)
        blocks = layer.weight.data.float().view(rows, block, columns, block)
        scales = blocks.abs().amax((1, 3)) / torch.finfo(_FP8).max
        tensors[f"{name}.weight"] = (blocks / scales[:, None, :, None]).view_as(layer.weight).to(_FP8)
        tensors[f"{name}.weight_scale_inv"] = scales
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    _save(model, folder, settings, tensors)


def save_compressed(model: Any, folder: Path, *, strategy: str = "channel", activations: str = "token") -> None:
    """8 bits, and 8 for activations, as compressed-tensors and thereby llm-compressor write them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in _layers(model):
        weight = layer.weight.data.float()
        scales = (weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max().view(1)) / 127
        tensors[f"{name}.weight"] = (weight / scales).round().clamp(-127, 127).to(torch.int8)
        tensors[f"{name}.weight_scale"] = scales.to(layer.weight.dtype)
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "weights": {**numbers, "strategy": strategy},
        "input_activations": {**numbers, "strategy": activations, "dynamic": True},
    }
    _save(model, folder, _compressed(group, "int-quantized"), tensors)


def save_compressed_int4(model: Any, folder: Path, *, group: int = 32) -> None:
    """4 bits in groups, and whole activations."""
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in _layers(model):
        groups = layer.weight.data.float().unflatten(1, (-1, group))
        scales = groups.abs().amax(2) / 7
        numbers = (groups / scales[:, :, None]).round().clamp(-8, 7) + 8
        tensors[f"{name}.weight_packed"] = _eight_in_one(numbers.flatten(1), 1)
        tensors[f"{name}.weight_scale"] = scales.to(layer.weight.dtype)
        tensors[f"{name}.weight_shape"] = torch.tensor(layer.weight.shape)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    _save(model, folder, _compressed({"weights": weights}, "pack-quantized"), tensors)


def _compressed(group: dict[str, Any], form: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
    }
