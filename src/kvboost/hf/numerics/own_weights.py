"""Modules that multiply with weights of their own, as routers and experts do, in rows that do not depend on company.

Used by :mod:`kvboost.hf.numerics.tiles`. An expert is given the rows that were sent to it, so how many there are
depends on the whole step. Products run in tested sizes (:mod:`kvboost.hf.numerics.rows`), functions of many numbers on
whole vectors. Experts run in Transformers' grouped forward, whatever kernel is configured: rows are sorted by expert
once, and a row's experts are summed in the row's own order. Invariant: a module that multiplies in another way than by
``linear`` or ``grouped_mm`` with a weight of a tested shape is refused when it first runs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import grouped_mm_experts_forward

from kvboost.hf.attention import UnsupportedAttentionError
from kvboost.hf.numerics.forwards import Forward, missing
from kvboost.hf.numerics.rows import PackedWeight, RowSizes, run_rows

Shape = tuple[int, int, torch.dtype, bool]
"""Outputs, inputs, type and whether there is a bias: what the sizes of a product depend on."""
_PRODUCTS = ("mm", "matmul", "einsum", "conv", "dot", "bilinear", "linear")  # parts of the names of torch's functions
_VECTORISED = ("sigmoid", "silu", "gelu", "tanh", "exp", "log", "log1p", "log_sigmoid", "softplus", "mish", "erf")


def is_own(module: torch.nn.Module, known: tuple[type, ...]) -> bool:
    """Whether this is a module of Transformers with matrices of its own, and none of the ``known`` layers."""
    matrices = any(weight is not None and weight.dim() > 1 for weight in module._parameters.values())
    return matrices and not isinstance(module, known) and type(module).__module__.startswith("transformers.models.")


def shapes_of(module: torch.nn.Module) -> Iterator[tuple[Shape, torch.Tensor]]:
    """The products it may make: with each of its matrices, and with each of a stack of them; and with which."""
    given = {name: weight for name, weight in module._parameters.items() if weight is not None}
    biases = (False, True) if any("bias" in name for name in given) else (False,)  # each shape takes time to test
    for name, weight in given.items():
        if weight.dim() in (2, 3) and "bias" not in name:
            outputs, inputs = weight.shape[-2:]
            yield from (((int(outputs), int(inputs), weight.dtype, bias), weight) for bias in biases)


class PackedWeights:
    """Packed copies of a module's weights of some shapes, and of each of a stack of them."""

    def __init__(self, module: torch.nn.Module, shapes: Container[Shape]) -> None:
        self._module, self._shapes = module, shapes
        self._by_place = self._pack()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(packed.nbytes for packed in self._by_place.values())

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight | None:
        """The copy of one of its weights; None if its shape is not packed."""
        if _shape(weight, bias is not None) not in self._shapes:
            return None
        if weight.data_ptr() not in self._by_place:  # the module got others
            self._by_place = self._pack()
        return self._by_place[weight.data_ptr()]

    def _pack(self) -> dict[int, PackedWeight]:
        stacks = {id(stack): stack for shape, stack in shapes_of(self._module) if shape in self._shapes}
        matrices = [one for stack in stacks.values() for one in stack.view(-1, *stack.shape[-2:])]
        return {one.data_ptr(): PackedWeight(one) for one in matrices}


def _shape(weight: torch.Tensor, bias: bool) -> Shape:
    outputs, inputs = weight.shape
    return outputs, inputs, weight.dtype, bias


def forward_of(
    module: torch.nn.Module, sizes: Mapping[Shape, RowSizes], packed: PackedWeights | None = None
) -> Forward:
    """A forward of this module whose rows do not depend on each other."""
    experts = hasattr(module, "_apply_gate")  # those have a choice of kernels
    own = partial(grouped_mm_experts_forward if experts else type(module).forward, module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _InRows(type(module).__name__, sizes, packed):
            return own(*args, **kwargs)

    return forward


class WholeVectors(TorchFunctionMode):
    """Runs functions of many numbers on whole vectors, wherever a model calls them: gates are no modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = args[0] if args else None
        if getattr(func, "__name__", "") not in _VECTORISED or not isinstance(x, torch.Tensor) or not x.dim():
            return func(*args, **(kwargs or {}))
        flat = x.reshape(-1, x.shape[-1] if x.dim() > 1 else 1)
        extra = missing(flat.shape[0], (flat.shape[1],), torch.get_num_threads())
        if extra == 0 and x.is_contiguous():  # as within an activation whose rows were padded: not again
            return func(*args, **(kwargs or {}))
        result = func(pad(flat, (0, 0, 0, extra)), *args[1:], **(kwargs or {}))
        return result[: flat.shape[0]].view(x.shape)


class _InRows(TorchFunctionMode):
    """Runs the products of a module in rows."""

    def __init__(self, name: str, sizes: Mapping[Shape, RowSizes], packed: PackedWeights | None) -> None:
        super().__init__()
        self._name, self._sizes, self._packed = name, sizes, packed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is linear:
            return self._linear(*args, **(kwargs or {}))
        if "grouped_mm" in name:  # torch's or Transformers', by type and version
            return self._grouped(*args, **(kwargs or {}))
        if any(part in name for part in _PRODUCTS):
            raise UnsupportedAttentionError(f"{self._name} multiplies with weights in its own way ({name})")
        return func(*args, **(kwargs or {}))

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        sizes = self._sizes.get(_shape(weight, bias is not None))
        if sizes is None or not weight.is_contiguous():
            raise UnsupportedAttentionError(f"{self._name} multiplies with a weight that is not its own")
        packed = self._packed.of(weight, bias) if self._packed is not None else None
        layer = partial(packed or linear, weight=weight, bias=bias)
        rows = run_rows(layer, x.reshape(-1, weight.shape[1]), sizes)
        return rows.view(*x.shape[:-1], weight.shape[0])

    def _grouped(self, x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, **more: Any) -> torch.Tensor:
        """Rows [rows, inputs] that are sorted by expert, with [experts, inputs, outputs]; ``offs`` are their ends."""
        if any(setting is not None for setting in more.values()):
            raise UnsupportedAttentionError(f"{self._name} multiplies with weights in its own way ({sorted(more)})")
        ends = offs.tolist()
        parts = [
            self._linear(x[start:end], weight.t())
            for start, end, weight in zip([0, *ends], ends, weights, strict=False)
            if end > start
        ]
        return torch.cat((*parts, x.new_zeros(len(x) - ends[-1], weights.shape[2])))  # of no expert: those are masked
