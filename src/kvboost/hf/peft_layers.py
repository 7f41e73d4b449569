"""Reads what PEFT put into a model: which layers carry adapters, and which tensors belong to which adapter.

Called by the fingerprint and by :class:`~kvboost.hf.adapters.Adapters`. Invariants: every weight belongs to the base
model or to exactly one adapter; what PEFT keeps elsewhere than in its layers counts as the base model's. Every merge
into a layer's weights and out of them raises their versions, as any other write does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from kvboost.errors import ConfigError

# What PEFT puts around a wrapped model and a wrapped layer. Without them a weight has the name it has without PEFT.
_MODEL_PREFIX = "base_model.model."
_LAYER_PREFIXES = ("base_layer.", "original_module.")


def walk(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every module of ``model`` once, as ``model.modules()`` but five times faster: requests do it several times."""
    seen, waiting = {model}, [model]
    while waiting:
        module = waiting.pop()
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


class AdapterLayer(NamedTuple):
    """How one layer uses its adapters now."""

    path: str
    """The module's name: two layers that swap their scalings are not the same model."""
    kind: str
    active: tuple[str, ...]
    """In the order in which their outputs are added up."""
    disabled: bool
    merged: tuple[str, ...]
    scaling: tuple[tuple[str, float], ...]


def _noted(method: Callable[..., Any]) -> Any:
    def change(merged: _MergedAdapters, *arguments: Any) -> Any:
        result = method(merged, *arguments)
        merged.note()
        return result

    return change


class _MergedAdapters(list[str]):
    """The list in which PEFT's layer keeps what is merged into it; here its changes show in the layer's weights.

    PEFT writes with ``weight.data += delta``, which leaves no trace in a tensor. What it takes out again is not, to
    the last bit, what it put in: a merge that was undone is a change too. PEFT changes this list at each of them.
    """

    def __init__(self, layer: Any, merged: Sequence[str]) -> None:
        super().__init__(merged)
        self._layer = weakref.ref(layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # in a copy of the model, or in a file: a list as any other

    def note(self) -> None:
        """Tell whoever watches the weights that they were written to."""
        if (layer := self._layer()) is not None:
            increment_version(list(layer.get_base_layer().parameters()))

    append, extend = _noted(list.append), _noted(list.extend)
    remove, clear = _noted(list.remove), _noted(list.clear)

    def pop(self, *index: Any) -> str:
        """Noted twice: PEFT writes after it, and another thread may look in between."""
        self.note()
        popped = _Popped(super().pop(*index))
        popped.merged = self
        return popped


class _Popped(str):
    """What PEFT's ``unmerge`` takes out and holds until it has written to the weights."""

    merged: _MergedAdapters

    def __del__(self) -> None:
        self.merged.note()


class _Watched:
    """The attribute ``merged_adapters`` of PEFT's class of layers: a layer may come and go between two looks."""

    def __get__(self, layer: Any, kind: type | None = None) -> Any:
        if layer is None:
            return self
        merged = layer.__dict__.get("merged_adapters", ())
        if not isinstance(merged, _MergedAdapters):  # older than this, or in a copy of a layer
            merged = layer.__dict__["merged_adapters"] = _MergedAdapters(layer, merged)
        return merged

    def __set__(self, layer: Any, merged: Sequence[str]) -> None:
        known = "merged_adapters" in layer.__dict__
        layer.__dict__["merged_adapters"] = watched = _MergedAdapters(layer, merged)
        if known:
            watched.note()


def watch_merges() -> None:
    """Import PEFT if nobody has, and see every later merge."""
    _peft()


def merges_missed() -> bool:
    """Whether there may have been merges that nobody saw: PEFT was there first. See every later one.

    Where the answer has changed, weights may have changed too.
    """
    return "peft" in sys.modules and _peft().missed


def adapter_layer(path: str, module: Any) -> AdapterLayer | None:
    """What ``module`` does with adapters; None if it is not a PEFT layer."""
    if "peft" not in sys.modules or not isinstance(module, _peft()[:2]):
        return None
    # PEFT's wrappers forward unknown attributes to the layer inside, so only tuner layers are queried.
    tuner = isinstance(module, _peft().tuner)
    scaling = getattr(module, "scaling", None) if tuner else None
    return AdapterLayer(
        path,
        type(module).__name__,
        tuple(module.active_adapters),
        bool(module.disable_adapters),
        tuple(module.merged_adapters) if tuner else (),
        tuple(sorted((str(k), float(v)) for k, v in scaling.items())) if isinstance(scaling, dict) else (),
    )


def adapter_layers(model: Any, modules: Iterable[Any]) -> tuple[AdapterLayer, ...]:
    """What the layers of ``model`` do with adapters; ``modules`` are all of its own. Called twice in every request."""
    kinds = _peft()[:2] if "peft" in sys.modules else ()
    if not any(isinstance(module, kinds) for module in modules):
        return ()  # almost always: without the names of all modules, which take longer
    return tuple(layer for _, layer in _layers(model))


class _Peft(NamedTuple):
    tuner: Any
    auxiliary: Any
    missed: bool


@cache
def _peft() -> _Peft:
    missed = "peft" in sys.modules
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    BaseTunerLayer.merged_adapters = _Watched()
    return _Peft(BaseTunerLayer, AuxiliaryTrainingWrapper, missed)


class WeightNames:
    """Weight names without PEFT's parts, and the adapter that owns each weight."""

    def __init__(self, model: Any) -> None:
        self._containers = {
            path: (*module.adapter_layer_names, *getattr(module, "other_param_names", ()))
            for path, module in model.named_modules()
            if adapter_layer(path, module) is not None
        }

    def owner_and_name(self, name: str) -> tuple[str | None, str]:
        """The adapter that a weight belongs to (None: the base model), and the weight's name without PEFT's parts.

        An adapter's own name is left out too: the same adapter under two names is the same adapter.
        """
        if not self._containers:
            return None, name
        owner: str | None = None
        path, rest = "", name
        plain: list[str] = []
        while rest:
            head, _, rest = rest.partition(".")
            path = f"{path}.{head}" if path else head
            plain.append(head)
            for container in self._containers.get(path, ()):
                if owner is None and rest.startswith(f"{container}."):
                    owner, _, inner = rest[len(container) + 1 :].partition(".")
                    return owner, plain_path(".".join([*plain, container, inner]))
            if path in self._containers:
                for prefix in _LAYER_PREFIXES:
                    if rest.startswith(prefix):
                        path, rest = f"{path}.{prefix[:-1]}", rest[len(prefix) :]
        return None, plain_path(".".join(plain))


def plain_path(path: str) -> str:
    """A module's name without the wrapper that PEFT puts around a model."""
    return path.removeprefix(_MODEL_PREFIX)


class AdapterChoice:
    """A saved choice of adapters per layer, to be restored later."""

    def __init__(self, model: Any) -> None:
        self._layers = [(module, layer.active, layer.disabled) for module, layer in _layers(model)]
        self._gradients = [(p, p.requires_grad) for module, _, _ in self._layers for p in module.parameters()]

    def restore(self) -> None:
        """Restore it, including the parameters' ``requires_grad``, which PEFT changes too."""
        for module, active, disabled in self._layers:
            _choose(module, active, disabled=disabled)
        for parameter, required in self._gradients:
            parameter.requires_grad_(required)


def refuse_merged(model: Any) -> None:
    """Raise ConfigError if adapters were merged into the weights, where they cannot be switched."""
    for _, layer in _layers(model):
        if layer.merged:
            raise ConfigError(
                f"the adapters {', '.join(layer.merged)} are merged into the weights, so no other can be selected; "
                "call model.unmerge_adapter() first"
            )


def choose_adapter(model: Any, name: str | None) -> None:
    """Let every layer use this adapter alone; None is the base model."""
    refuse_merged(model)
    for module, layer in _layers(model):
        _choose(module, layer.active if name is None else (name,), disabled=name is None)


def active_adapters(model: Any) -> tuple[str, ...]:
    """The adapters that some layer uses, in the order in which they are added up; empty for the base model."""
    used = [name for _, layer in _layers(model) if not layer.disabled for name in layer.active]
    return tuple(dict.fromkeys(used))


def _layers(model: Any) -> list[tuple[Any, AdapterLayer]]:
    found = [(module, adapter_layer(path, module)) for path, module in model.named_modules()]
    return [(module, layer) for module, layer in found if layer is not None]


def _choose(module: Any, names: tuple[str, ...], *, disabled: bool) -> None:
    try:
        module.set_adapter(list(names))
    except ValueError:  # a saved module (lm_head, say) that these adapters leave as it is
        module.set_adapter([])
    if module.disable_adapters != disabled:
        module.enable_adapters(not disabled)
