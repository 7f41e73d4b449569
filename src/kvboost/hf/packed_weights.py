"""Weights that are more than the one tensor a module names: what quantisation libraries keep beside packed numbers.

Used by the digests of weights and by the watch for changes, in :mod:`kvboost.hf.weights`. The same packed bytes stand
for other numbers with other scales, and libraries keep those in tensors within the tensor (torchao, Quanto), on the
parameter (bitsandbytes) or on the module (bitsandbytes once it has run, HQQ), where neither ``parameters()`` nor
``buffers()`` shows them. Nothing is imported: a library whose weights are here has been imported by others.

Invariant: weights whose kinds and tensors are equal stand for the same numbers, computed by the same version.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvboost.errors import UnsupportedModelError

_PLAIN = {torch.nn.Parameter, torch.Tensor}
_WORDS = (bool, int, float, str, torch.dtype, torch.device, type(None))
# Of modules: how compressed-tensors and GGUF's packed layers read their weights and what they do to activations.
_SETTINGS = ("quantization_scheme", "quantization_enabled", "ggml_type", "gate_up_type", "down_type")


class Packed(NamedTuple):
    """What one weight is made of."""

    kind: str
    """Everything but tensors: the class, its library's version, how numbers are packed."""
    tensors: tuple[torch.Tensor, ...]


def packed(module: Any, tensor: torch.Tensor) -> Packed | None:
    """What a weight of ``module`` is made of; None for one that is just its bytes.

    Raises UnsupportedModelError for a class that keeps more than its bytes in a way that is not known here.
    """
    if type(tensor) in _PLAIN:
        return _hqq(module, tensor) if _library(module) == "hqq" else None
    library = _library(tensor)
    if library == "torch":  # as FakeTensor and DTensor: with these, reading the bytes fails
        return None
    if hasattr(tensor, "__tensor_flatten__"):
        return _flattened(tensor)
    if library == "bitsandbytes":
        return _four_bits(module, tensor) if hasattr(tensor, "quant_state") else _eight_bits(module, tensor)
    if all(isinstance(value, _WORDS) for value in vars(tensor).values()):
        return Packed(_kind(tensor, vars(tensor)), (tensor,)) if vars(tensor) else None
    raise UnsupportedModelError(
        f"its weights are of {type(tensor).__module__}.{type(tensor).__qualname__}, which may keep more than their "
        "bytes, so that this model cannot be told from others. Pass strict=False to run it without reuse."
    )


def tensors_of(module: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The plain tensors that a weight is made of; the weight itself where that cannot be told."""
    if type(tensor) in _PLAIN and "hqq" not in sys.modules:
        return (tensor,)
    try:
        found = packed(module, tensor)
    except UnsupportedModelError:  # said when the weights are hashed
        return (tensor,)
    return found.tensors if found is not None else (tensor,)


def traces_of(weights: Sequence[tuple[Any, torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors in which a change of weights, each with its module, shows: what they are made of, and themselves."""
    if {type(tensor) for _, tensor in weights} <= _PLAIN and "hqq" not in sys.modules:  # most: a request asks twice
        return [tensor for _, tensor in weights]
    found: list[torch.Tensor] = []
    for module, tensor in weights:
        parts = tensors_of(module, tensor)
        found += parts if parts[0] is tensor else (tensor, *parts)
    return found


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a weight is not what its layer multiplies with: a class or a type of its own."""
    return type(tensor) not in _PLAIN or not tensor.dtype.is_floating_point or tensor.element_size() == 1


def settings_of_modules(model: Any) -> list[list[str]]:
    """By path, what says how modules read their weights and is in no config if the user packed them."""
    found = [[path, *_settings(module)] for path, module in model.named_modules()]
    return [settings for settings in found if len(settings) > 1]


def _settings(module: Any) -> list[str]:
    own = vars(module)
    names = {name for name in _SETTINGS if own.get(name) is not None}
    tensors = (*module._parameters.values(), *module._buffers.values())
    if not module._modules and any(tensor is not None and is_packed(tensor) for tensor in tensors):
        names |= {name for name, value in own.items() if type(value) in (int, float)}  # a scale may be no tensor
    return [f"{name}={own[name]}" for name in sorted(names)]


def settle(model: Any) -> None:
    """Unpack what compressed-tensors unpacks within the first forward: after that weights and hooks stay."""
    for module in list(model.modules()):
        handle = vars(module).get("ct_decompress_hook")
        if handle is not None:
            module._forward_pre_hooks[handle.id](module, ())


def _library(thing: Any) -> str:
    return type(thing).__module__.partition(".")[0]


def _kind(thing: Any, settings: Any) -> str:
    module = type(thing).__module__
    packages = [sys.modules.get(module.rsplit(".", cut)[0]) for cut in range(module.count(".") + 1)]
    version = next((found for one in packages if (found := getattr(one, "__version__", None)) is not None), "")
    return f"{module}.{type(thing).__qualname__} {version} {settings!r}"


def _flattened(tensor: Any) -> Packed:
    """By the protocol with which torch takes such tensors apart, and puts them together again, to compile models."""
    names, context = tensor.__tensor_flatten__()
    kinds = [_kind(tensor, context)]
    tensors: list[torch.Tensor] = []
    for name in names:
        inner = getattr(tensor, name)
        deeper = packed(None, inner) or Packed("", (inner,))
        kinds.append(f"{name}:{deeper.kind}")
        tensors += deeper.tensors
    return Packed("|".join(kinds), tuple(tensors))


def _four_bits(module: Any, tensor: Any) -> Packed:
    """Blocks' scales, which may be packed themselves, and the code book are on the parameter."""
    state = tensor.quant_state or getattr(module, "quant_state", None)
    if state is None:  # not packed yet
        return Packed(_kind(tensor, [tensor.quant_type, tensor.blocksize]), (tensor,))
    settings = [state.quant_type, state.blocksize, str(state.dtype), list(state.shape)]
    # What it computes in, once it has run, is the dtype of its input if none was set.
    settings.append(str(getattr(module, "compute_dtype", None) or state.dtype))
    tensors = [tensor, state.absmax, state.code]
    if state.nested:
        settings += [state.state2.blocksize, str(state.state2.dtype)]
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    return Packed(_kind(tensor, settings), _present(tensors))


def _eight_bits(module: Any, tensor: Any) -> Packed:
    """Rows' scales are on the parameter, and on the module's state from its first forward on."""
    state = getattr(module, "state", None)
    scales = tensor.SCB if getattr(tensor, "SCB", None) is not None else getattr(state, "SCB", None)
    settings = [getattr(state, name, None) for name in ("threshold", "has_fp16_weights")]
    return Packed(_kind(tensor, settings), _present([tensor, scales]))


def _hqq(module: Any, tensor: torch.Tensor) -> Packed | None:
    """Groups' scales and zero points are in a dict on the module, packed or not."""
    meta = getattr(module, "meta", None)
    if tensor is not module._parameters.get("W_q") or not isinstance(meta, Mapping):
        return None
    words, tensors = _sorted_out(meta)
    return Packed(_kind(module, [*words, str(getattr(module, "compute_dtype", None))]), (tensor, *tensors))


def _sorted_out(values: Mapping[str, Any]) -> tuple[list[str], list[torch.Tensor]]:
    words: list[str] = []
    tensors: list[torch.Tensor] = []
    for name, value in sorted(values.items()):
        if isinstance(value, torch.Tensor):
            words.append(name)
            tensors.append(value)
        elif isinstance(value, Mapping):
            inner = _sorted_out(value)
            words.append(f"{name}:{inner[0]}")
            tensors += inner[1]
        else:
            words.append(f"{name}={value}")
    return words, tensors


def _present(tensors: Iterable[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)
