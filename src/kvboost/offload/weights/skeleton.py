"""A model without its weights: where they belong, and which of them stay in memory for one budget.

Built when a model is loaded to be streamed, and by memory estimates. Invariants: parameters take no memory; buffers
that no checkpoint holds (rotary tables) are as the model's own code made them; what stays, and two buffers as large as
the largest unit that is streamed, take no more than the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from kvboost.capacity import WeightMemory
from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.hf.layers import decoder_layers
from kvboost.offload.weights.link import Extent
from kvboost.offload.weights.slabs import REST, Slab, Weight, lay_out


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
                if not isinstance(tensor, torch.nn.Parameter):  # one for all names
                    tensor = torch.nn.Parameter(tensor, requires_grad=False)
                module._parameters[key] = tensor
            else:
                module._buffers[key] = tensor


def build_skeleton(config: Any, *, dtype: torch.dtype, **arguments: Any) -> Skeleton:
    """The model of this config, on no device."""
    with _EmptyWithoutMemory():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **arguments)
    model.eval()
    _check_dtypes(model, dtype)
    try:
        layers = decoder_layers(model)
    except UnsupportedModelError as error:
        raise ConfigError(
            f"{config.model_type} has no list of decoder layers to stream; leave weight_budget out"
        ) from error
    aliases = _aliases(model)
    unshared = {id(tensor) for tensor, names in aliases.values() if len(names) == 1}
    matrices = [{id(p) for p in layer.parameters() if p.dim() > 1 and id(p) in unshared} for layer in layers]
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


def _described(
    names: list[str], aliases: dict[str, tuple[torch.Tensor, list[str]]]
) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, aliases[name][0].dtype, aliases[name][0].shape) for name in names]


@dataclass(frozen=True)
class Unit:
    """What is loaded at once: a decoder layer's matrices, or where two layers do not fit, a part of them."""

    index: int
    layer: int
    extent: Extent
    weights: tuple[Weight, ...]


@dataclass(frozen=True)
class WeightPlacement:
    """Which units stay and which are streamed."""

    units: tuple[Unit, ...]
    """In the order they are computed."""
    resident: frozenset[int]
    """Units that stay, by index."""
    rest_bytes: int
    """Everything outside the layers' matrices, which always stays."""
    parts_per_layer: int

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one of the two buffers."""
        return max((unit.extent.size for unit in self.streamed), default=0)

    @property
    def streamed(self) -> list[Unit]:
        """Units that are streamed through the buffers."""
        return [unit for unit in self.units if unit.index not in self.resident]

    @property
    def memory(self) -> WeightMemory:
        """Where the weights are, in bytes."""
        return WeightMemory(
            resident=self.rest_bytes + sum(self.units[index].extent.size for index in self.resident),
            buffers=min(2, len(self.streamed)) * self.buffer_bytes,
            streamed=sum(unit.extent.size for unit in self.streamed),
        )


def place_weights(rest: Slab, layers: Sequence[Slab], *, budget: int) -> WeightPlacement:
    """As few parts per layer as two buffers allow, then as many of them resident as fit."""
    groups = [_by_module(slab) for slab in layers]
    for parts in range(1, max(map(len, groups)) + 1):
        cut = [_cut(of_layer, parts) for of_layer in groups]
        units = tuple(
            Unit(index, layer, Extent(layers[layer].name, part[0].offset, part[-1].end - part[0].offset), part)
            for index, (layer, part) in enumerate((layer, part) for layer, of in enumerate(cut) for part in of)
        )
        placement = WeightPlacement(units, frozenset(), rest.size, parts)
        if placement.memory.in_memory <= budget:
            return _with_residents(placement, budget)
    raise ConfigError(
        f"weight_budget={budget / 1e6:.1f} MB is too small for this model: what is used in every step takes "
        f"{rest.size / 1e6:.1f} MB, and two of its matrices {2 * placement.buffer_bytes / 1e6:.1f} MB; "
        f"give at least {ceil(placement.memory.in_memory / 1e5) / 10:.1f} MB"
    )


def _with_residents(placement: WeightPlacement, budget: int) -> WeightPlacement:
    """As many units as fit stay, spread evenly: between two that stay, the link has time to bring the next."""
    count = len(placement.units)
    best = placement
    for wanted in range(1, count + 1):
        resident = frozenset(i * count // wanted for i in range(wanted))
        candidate = replace(placement, resident=resident)
        if candidate.memory.in_memory > budget:
            break
        best = candidate
    return best


def _by_module(slab: Slab) -> list[list[Weight]]:
    """A slab's weights, those of one module together: a module needs all of its own at once."""
    groups: list[list[Weight]] = []
    for weight in slab.weights:
        module = weight.name.rpartition(".")[0]
        if groups and groups[-1][0].name.rpartition(".")[0] == module:
            groups[-1].append(weight)
        else:
            groups.append([weight])
    return groups


def _cut(groups: Sequence[list[Weight]], parts: int) -> list[tuple[Weight, ...]]:
    """Neighbouring groups in at most ``parts`` parts, the largest as small as possible."""
    sizes = [group[-1].end - group[0].offset for group in groups]
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    cut: list[tuple[Weight, ...]] = []
    begin = 0
    for length in _filled(sizes, low):
        cut.append(tuple(weight for group in groups[begin : begin + length] for weight in group))
        begin += length
    return cut


def _filled(sizes: Sequence[int], capacity: int) -> list[int]:
    """How many neighbours go into each part if none may be larger than ``capacity``."""
    lengths: list[int] = []
    free = -1
    for size in sizes:
        if size > free or not lengths:
            lengths.append(0)
            free = capacity
        lengths[-1] += 1
        free -= size
    return lengths
