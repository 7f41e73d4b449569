"""Modules that multiply with weights of their own, as routers and experts do, in rows that do not depend on company.

Used by :mod:`kvboost.hf.numerics.tiles`. An expert is given the rows that were sent to it, so how many there are
depends on the whole step. Products run in tested sizes (:mod:`kvboost.hf.numerics.rows`), functions of many numbers on
whole vectors. Experts run one after another, in Transformers' own loop, whatever kernel is configured. Invariant: a
module that multiplies in another way than by ``linear`` with a weight of a tested shape is refused when it first runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode

from kvboost.hf.attention import UnsupportedAttentionError
from kvboost.hf.numerics.forwards import Forward, missing
from kvboost.hf.numerics.rows import RowSizes, run_rows

Shape = tuple[int, int, torch.dtype, bool]
"""Outputs, inputs, type and whether there is a bias: what the sizes of a product depend on."""
_PRODUCTS = ("mm", "matmul", "einsum", "conv", "dot", "bilinear", "linear")  # parts of the names of torch's functions
_VECTORISED = ("sigmoid", "silu", "gelu", "tanh", "exp", "softplus", "mish", "erf")


def is_own(module: torch.nn.Module, known: tuple[type, ...]) -> bool:
    """Whether this is a module of Transformers with matrices of its own, and none of the ``known`` layers."""
    matrices = any(weight is not None and weight.dim() > 1 for weight in module._parameters.values())
    return matrices and not isinstance(module, known) and type(module).__module__.startswith("transformers.models.")


def shapes_of(module: torch.nn.Module) -> Iterator[Shape]:
    """The products it may make: with each of its matrices, and with each of a stack of them."""
    for weight in module._parameters.values():
        if weight is not None and weight.dim() in (2, 3):
            outputs, inputs = weight.shape[-2:]
            yield from ((int(outputs), int(inputs), weight.dtype, bias) for bias in (False, True))


def forward_of(module: torch.nn.Module, sizes: Mapping[Shape, RowSizes]) -> Forward:
    """A forward of this module whose rows do not depend on each other."""
    loop = getattr(type(module).forward, "__wrapped__", None)  # experts: their loop, without a choice of kernels
    own: Callable[..., Any] = partial(loop, module) if loop is not None else type(module).forward.__get__(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _InRows(type(module).__name__, sizes):
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
        result = func(pad(flat, (0, 0, 0, extra)), *args[1:], **(kwargs or {}))
        return result[: flat.shape[0]].view(x.shape)


class _InRows(TorchFunctionMode):
    """Runs the products of a module in rows."""

    def __init__(self, name: str, sizes: Mapping[Shape, RowSizes]) -> None:
        super().__init__()
        self._name, self._sizes = name, sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is linear:
            return self._linear(*args, **(kwargs or {}))
        if any(part in name for part in _PRODUCTS):
            raise UnsupportedAttentionError(f"{self._name} multiplies with weights in its own way ({name})")
        return func(*args, **(kwargs or {}))

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        outputs, inputs = weight.shape
        sizes = self._sizes.get((outputs, inputs, weight.dtype, bias is not None))
        if sizes is None:
            raise UnsupportedAttentionError(f"{self._name} multiplies with a weight that is not its own")
        rows = run_rows(lambda part: linear(part, weight, bias), x.reshape(-1, inputs), sizes)
        return rows.view(*x.shape[:-1], outputs)
