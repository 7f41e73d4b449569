"""AWQ checkpoints of 4 bits per weight, computed with torch's own int4 kernel on the CPU.

Used when an AWQ checkpoint is loaded with a weight budget. Invariant: what is computed is ``(q - zero) * scale`` of the
checkpoint, group by group; only the order of the bits in memory is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from kvboost.errors import ConfigError
from kvboost.hf.checkpoint import Shards

# Where AWQ puts the eight neighbours it packs into one int32, lowest bits first.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# More rows than this are faster with dequantised weights: the int4 kernel reads the packed ones once per row.
_MAX_ROWS = 16
_BLOCK = 64  # outputs that torch packs together
_GROUPS = (32, 64, 128, 256)
_INT4, _SCALES = "packed", "scales_and_zeros"


class Int4Linear(torch.nn.Module):
    """A linear layer over 4-bit weights in torch's layout for the CPU."""

    def __init__(self, like: torch.nn.Linear, *, group: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group = like.in_features, like.out_features, group
        dtype = like.weight.dtype
        shape = (self.in_features // group, self.out_features, 2)
        self.packed = _without_memory((self.out_features, self.in_features // 2), torch.uint8)
        self.scales_and_zeros = _without_memory(shape, dtype)
        self.bias = like.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As ``torch.nn.Linear``."""
        rows = inputs.reshape(-1, self.in_features)
        if len(rows) <= _MAX_ROWS:
            outputs = _multiply(rows.contiguous(), self.packed, self.group, self.scales_and_zeros)
        else:
            outputs = rows @ self.dequantised().T
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.view(*inputs.shape[:-1], self.out_features)

    def dequantised(self) -> torch.Tensor:
        """The weights as numbers [out, in]."""
        if not _layout_is_known(self.out_features):
            everything = torch.eye(self.in_features, dtype=self.scales_and_zeros.dtype)
            return _multiply(everything, self.packed, self.group, self.scales_and_zeros).T
        quantised = _unpacked(self.packed, self.in_features)
        scales, zeros = self.scales_and_zeros.permute(2, 1, 0).unsqueeze(-1)  # [out, groups, 1] each
        grouped = (quantised.view(self.out_features, -1, self.group) - 8).to(scales.dtype)
        whole: torch.Tensor = grouped * scales + zeros
        return whole.view(self.out_features, self.in_features)


class AwqWeights:
    """The 4-bit weights of a checkpoint, and how they are told apart from the others."""

    def __init__(self, shards: Shards, settings: Any) -> None:
        """``settings`` is the config's ``quantization_config``. Raises ConfigError for what is not built."""
        config = settings if isinstance(settings, dict) else settings.to_dict()
        bits, self._group = config.get("bits", 4), int(config.get("group_size", 128))
        version = str(config.get("version", "gemm")).lower().rpartition(".")[2]
        if config.get("quant_method") != "awq" or bits != 4 or version != "gemm" or self._group not in _GROUPS:
            raise ConfigError(
                f"of quantised checkpoints weight_budget takes AWQ with 4 bits in groups of {_GROUPS} (gemm), not "
                f"{config.get('quant_method')} with {bits} bits in groups of {self._group} ({version}); leave it out"
            )
        self._shards = shards
        self._modules = {name.removesuffix(".qweight") for name in shards.tensors if name.endswith(".qweight")}

    def prepare(self, model: torch.nn.Module) -> None:
        """Put 4-bit layers where the checkpoint has them."""
        for name in sorted(self._modules):
            path, _, key = name.rpartition(".")
            parent = model.get_submodule(path)
            linear = getattr(parent, key)
            if not isinstance(linear, torch.nn.Linear) or linear.out_features % 16:
                raise ConfigError(f"{name} cannot be computed with 4-bit weights; leave weight_budget out")
            setattr(parent, key, Int4Linear(linear, group=self._group))

    def holds(self, name: str) -> bool:
        """Whether this weight is made from 4-bit ones."""
        module, _, key = name.rpartition(".")
        return module in self._modules and key in (_INT4, _SCALES)

    def pieces(self, name: str, dtype: torch.dtype) -> Iterator[memoryview]:
        """A weight as a 4-bit layer has it."""
        module, _, key = name.rpartition(".")
        if key == _INT4:
            quantised = _unpacked_awq(self._read(f"{module}.qweight")).T.contiguous()  # [out, in]
            made = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantised, 1)
        else:
            scales = self._read(f"{module}.scales").float()
            zeros = _unpacked_awq(self._read(f"{module}.qzeros"))
            made = torch.stack([scales, (8 - zeros) * scales], dim=-1).to(dtype)
        yield memoryview(made.contiguous().view(-1).view(torch.uint8).numpy())

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._shards.tensors[name]
        whole = bytearray(b"".join(self._shards.pieces(name, tensor.dtype)))
        return torch.frombuffer(whole, dtype=tensor.dtype).view(tensor.shape)


def _unpacked_awq(packed: torch.Tensor) -> torch.Tensor:
    """[rows, columns / 8] as AWQ packs it to [rows, columns] of int32."""
    places = torch.tensor([4 * _ORDER.index(column) for column in range(8)], dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> places) & 15).flatten(1)


def _unpacked(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Torch's layout back to [out, in] of uint8: blocks of 64 outputs, in them all inputs, two outputs to a byte."""
    blocks = packed.view(-1, columns, _BLOCK // 2)
    return torch.cat([blocks & 15, blocks >> 4], dim=-1).transpose(1, 2).reshape(-1, columns).to(torch.int8)


@cache
def _layout_is_known(outputs: int) -> bool:
    """Whether this machine packs as :func:`_unpacked` undoes it; kernels for other vector units do not."""
    if outputs % _BLOCK:
        return False
    sample = (torch.arange(outputs * 32, dtype=torch.int32) * 7919 // 64 % 16).view(outputs, 32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(sample, 1)
    return torch.equal(_unpacked(packed, 32).int(), sample)


def _multiply(rows: torch.Tensor, packed: torch.Tensor, group: int, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group, scales_and_zeros)
    return result


def _without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
