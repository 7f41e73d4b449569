"""oneDNN's prepacked linear layers: a copy of the weights in the layout its kernels want.

Used by :mod:`kvboost.hf.numerics.tiles` for layers whose own kernels have no class of sizes that is large enough. In
float32 the rows of a packed layer do not depend on the number of rows at all.
"""

from __future__ import annotations

from typing import Any

import torch

_ROWS = 128  # a hint for the layout; the same for all, so that the same weights are packed the same way


def can_pack(module: torch.nn.Module) -> bool:
    """Whether this layer is a plain linear layer on a CPU with oneDNN."""
    weight = getattr(module, "weight", None)
    return (
        type(module) is torch.nn.Linear
        and isinstance(weight, torch.Tensor)
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedLinear:
    """One linear layer, packed. Takes as much memory as the layer's weights."""

    def __init__(self, module: torch.nn.Linear) -> None:
        self._module = module
        self._linear: Any = torch.ops.mkldnn._linear_pointwise
        self._source: tuple[int, int] | None = None
        self._refresh()

    @property
    def nbytes(self) -> int:
        """Bytes of the packed copy."""
        return int(self._module.weight.nbytes)

    def _refresh(self) -> None:
        """Pack again if the layer got other weights."""
        weight = self._module.weight
        # Inference tensors count no versions: a write to one of those goes unnoticed.
        source = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        if source != self._source:
            ops: Any = torch.ops.mkldnn
            self._weight = ops._reorder_linear_weight(weight.detach(), _ROWS)
            self._source = source

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._refresh()  # each time: PEFT unmerges within the forward in which adapters are disabled
        result: torch.Tensor = self._linear(x, self._weight, self._module.bias, "none", [], "")
        return result
