"""Reads what PEFT put into a model: which layers carry adapters, and which tensors belong to which adapter.

Called by the fingerprint and by :class:`~kvboost.hf.adapters.Adapters`. Invariant: every weight belongs to the base
model or to exactly one adapter; what PEFT keeps elsewhere than in its layers counts as the base model's.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

# What PEFT puts around a wrapped model and a wrapped layer. Without them a weight has the name it has without PEFT.
_MODEL_PREFIX = "base_model.model."
_LAYER_PREFIXES = ("base_layer.", "original_module.")


class AdapterLayer(NamedTuple):
    """What one layer does with its adapters at this moment."""

    path: str
    """The module's name: two layers that swap their scalings are not the same model."""
    kind: str
    active: tuple[str, ...]
    """In the order in which their outputs are added up."""
    disabled: bool
    merged: tuple[str, ...]
    scaling: tuple[tuple[str, float], ...]


def adapter_layer(path: str, module: Any) -> AdapterLayer | None:
    """What ``module`` does with adapters; None if it is no layer of PEFT's."""
    if "peft" not in sys.modules:
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        return None
    # PEFT's wrappers pass unknown attributes on to the layer inside: ask the tuner layers alone.
    tuner = isinstance(module, BaseTunerLayer)
    scaling = getattr(module, "scaling", None) if tuner else None
    return AdapterLayer(
        path,
        type(module).__name__,
        tuple(module.active_adapters),
        bool(module.disable_adapters),
        tuple(module.merged_adapters) if tuner else (),
        tuple(sorted((str(k), float(v)) for k, v in scaling.items())) if isinstance(scaling, dict) else (),
    )


class WeightNames:
    """Names weights as if PEFT were not there, and says whose they are."""

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
