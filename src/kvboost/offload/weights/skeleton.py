"""A model without its weights, and the list of where they belong.

Built when a model is loaded to be streamed. Invariant: parameters take no memory; buffers that no checkpoint holds
(rotary tables) are as the model's own code made them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.hf.layers import decoder_layers
from kvboost.offload.weights.slabs import REST, Slab, lay_out


class _EmptyWithoutMemory(TorchFunctionMode):
    """``torch.empty``, with which modules make their parameters, gives meta tensors; what is computed stays real."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Skeleton:
    """A model whose weights are not loaded."""

    model: Any
    layers: list[torch.nn.Module]
    rest: Slab
    """Weights that always stay: outside the layers, vectors, and what is used more than once."""
    slabs: tuple[Slab, ...]
    """The matrices of each layer."""
    aliases: dict[str, list[str]]
    """All names of each weight, its own first."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights, without the slabs' padding."""
        return sum(weight.size for slab in (self.rest, *self.slabs) for weight in slab.weights)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Put a weight where it belongs, under all its names."""
        for alias in self.aliases[name]:
            path, _, key = alias.rpartition(".")
            module = self.model.get_submodule(path)
            if key in module._parameters:
                parameter = tensor if isinstance(tensor, torch.nn.Parameter) else None
                tensor = parameter if parameter is not None else torch.nn.Parameter(tensor, requires_grad=False)
                module._parameters[key] = tensor
            else:
                module._buffers[key] = tensor


def build_skeleton(
    config: Any, *, dtype: torch.dtype, prepare: Callable[[Any], None] = lambda model: None, **arguments: Any
) -> Skeleton:
    """The model of this config, on no device; ``prepare`` may replace its modules."""
    with _EmptyWithoutMemory():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **arguments)
    prepare(model)
    model.eval()
    _check_dtypes(model, dtype)
    try:
        layers = decoder_layers(model)
    except UnsupportedModelError as error:
        raise ConfigError(
            f"{config.model_type} has no list of decoder layers to stream; leave weight_budget out"
        ) from error
    aliases = _aliases(model)
    matrices = _matrices(layers, {id(tensor) for tensor, names in aliases.values() if len(names) == 1})
    slabs = []
    for number, of_layer in enumerate(matrices):
        names = [names[0] for tensor, names in aliases.values() if id(tensor) in of_layer]
        slabs.append(lay_out(f"layer-{number:04}", _described(names, aliases)))
    streamed = {weight.name for slab in slabs for weight in slab.weights}
    rest = lay_out(REST, _described([name for name in aliases if name not in streamed], aliases))
    return Skeleton(model, layers, rest, tuple(slabs), {name: names for name, (_, names) in aliases.items()})


def _check_dtypes(model: Any, dtype: torch.dtype) -> None:
    kept = list(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else []
    if dtype == torch.float16:
        kept += list(model._keep_in_fp32_modules or ())
    if kept:
        raise ConfigError(
            f"{model.config.model_type} keeps some weights in float32 beside {dtype}, which cannot be streamed yet; "
            "give dtype=torch.float32, or leave weight_budget out"
        )


def _aliases(model: Any) -> dict[str, tuple[torch.Tensor, list[str]]]:
    """Every tensor a checkpoint holds, by its first name, with all its names."""
    saved = set(model.state_dict().keys())
    by_tensor: dict[int, tuple[torch.Tensor, list[str]]] = {}
    everything = [
        *model.named_parameters(remove_duplicate=False),
        *((name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved),
    ]
    for name, tensor in everything:
        by_tensor.setdefault(id(tensor), (tensor, []))[1].append(name)
    return {names[0]: (tensor, names) for tensor, names in by_tensor.values()}


def _matrices(layers: list[torch.nn.Module], unshared: set[int]) -> list[set[int]]:
    """Each layer's parameters of two or more dimensions, by identity."""
    return [{id(p) for p in layer.parameters() if p.dim() > 1 and id(p) in unshared} for layer in layers]


def _described(
    names: list[str], aliases: dict[str, tuple[torch.Tensor, list[str]]]
) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, aliases[name][0].dtype, aliases[name][0].shape) for name in names]
