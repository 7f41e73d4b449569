"""Writes a model as an AWQ checkpoint: 4 bits per weight in AWQ's own layout, without its search for better scales.

usage: python -m tests.helpers.awq SOURCE TARGET [--group 64]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of 0 to 15 as int32 [rows, columns / 8]: nibble i holds the neighbour ``_ORDER[i]``."""
    eights = numbers.view(len(numbers), -1, 8).to(torch.int64)
    packed = sum(eights[:, :, column] << (4 * place) for place, column in enumerate(_ORDER))
    assert isinstance(packed, torch.Tensor)
    return (packed - (packed >= 2**31).long() * 2**32).to(torch.int32).contiguous()


def quantise(weight: torch.Tensor, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What AWQ stores for a weight [out, in], and the numbers that stands for."""
    groups = weight.T.reshape(-1, group, len(weight)).float()  # [groups, group, out]
    low, high = groups.amin(1).clamp(max=0.0), groups.amax(1).clamp(min=0.0)
    scales = ((high - low) / 15.0).clamp_min(1e-5).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    quantised = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    stored = {
        "qweight": pack(quantised.view(-1, len(weight))),
        "qzeros": pack(zeros),
        "scales": scales.contiguous(),
    }
    meant = (quantised - zeros[:, None]) * scales.float()[:, None]
    return stored, meant.view(-1, len(weight)).T.contiguous()


def save_awq(model: Any, folder: Path, *, group: int) -> None:
    """Write a model with its layers' matrices quantised, and leave it with the numbers they now stand for."""
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name, module in model.named_modules():
        if ".layers." in name and isinstance(module, torch.nn.Linear):
            stored, meant = quantise(module.weight.data, group)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{key}": tensor for key, tensor in stored.items()}
            module.weight.data = meant.to(module.weight.dtype)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--group", type=int, default=64)
    args = parser.parse_args()
    save_awq(AutoModelForCausalLM.from_pretrained(args.source), args.target, group=args.group)
    for file in args.source.glob("*token*"):
        shutil.copy(file, args.target)


if __name__ == "__main__":
    main()
