"""Measures how a model is to be run, once: what was found is kept, so that the next start need not run it.

Called once for every engine. Measuring may take seconds, so a bar is shown from the second one on. What is kept is
named by all that it depends on: the fields of the key of KV (weights, config, code, versions, threads, the CPU and its
flags), where each weight lies, the settings, the variables that kernels read, and the bits of a few small products made
now. Those stand for the tests that are not run again: another library, or another CPU that goes by the same name, sums
in another order and gives other bits. Invariant: a file of another name, or that is not whole, is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers
from transformers.utils.logging import is_progress_bar_enabled

from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.hf.cache_layers import StateSpec
from kvboost.hf.code_digest import hooks_of
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.loaded_weights import cache_directory, keep, read_kept
from kvboost.hf.numerics import ChosenNumerics, KnownTiles, Tiles, budget_to_pack, choose_numerics
from kvboost.hf.numerics.choose import attention_bits
from kvboost.hf.numerics.rows import RowSizes, cancelling
from kvboost.hf.probe import ModelFacts, probe_model
from kvboost.hf.shape import shape_of
from kvboost.steps import Numerics

_FORMAT = 2
_DECIDE = ("probe.py", "shape.py", "measured.py")  # beside the code that the key of KV names
_VARIABLES = ("ATEN_", "CUBLAS_", "CUDA_", "DNNL_", "GOMP_", "KMP_", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_", "TORCH_")
_INPUTS, _OUTPUTS, _SIZES = 1024, 64, (1, 4, 16, 32, 48, 128, 192)  # of the small products


class Known(NamedTuple):
    """What an earlier start found."""

    layout: KVLayout
    tiles: KnownTiles | None
    """None if it found none: why is found again."""


class KeptMeasurement:
    """What was measured of one model in its present state, with some settings."""

    def __init__(self, model: Any, fields: Mapping[str, str], settings: Any) -> None:
        """``fields`` name the model's KV, but for how it is stepped."""
        self._depends_on = _depends_on(model, fields, settings) if _is_its_own(model) else None
        name = _digest(self._depends_on)
        self._path = cache_directory() / "measured" / f"{name}.json"

    def read(self) -> Known | None:
        """What was found; None if nothing was kept, or it cannot be used."""
        return read_kept(self._path, self._parsed) if self._depends_on is not None else None

    def _parsed(self, content: Any) -> Known:
        found = content["found"]
        if content["depends_on"] != self._depends_on or content["digest"] != _digest([self._depends_on, found]):
            raise ValueError("it is damaged, or of something else")
        return _known(found)

    def write(self, layout: KVLayout, tiles: Tiles | None) -> None:
        """Keep this for the next start."""
        if self._depends_on is None:
            return
        found = {
            "layout": [[spec.heads, spec.dim, str(spec.dtype), str(spec.device)] for spec in layout.slots],
            "without_kv": list(layout.without_kv),
            "indexed": list(layout.indexed),
            "states": [[s.layer, s.kind, s.index, list(s.shape), str(s.dtype), str(s.device)] for s in layout.states],
            "granule": tiles.granule if tiles is not None else None,
            "choices": {name: [*_numbers(sizes), packed] for name, (sizes, packed) in tiles.choices.items()}
            if tiles is not None
            else {},
        }
        digest = _digest([self._depends_on, found])
        keep(self._path, {"depends_on": self._depends_on, "found": found, "digest": digest})


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _numbers(sizes: RowSizes) -> list[Any]:
    tested = [size for size, same in sizes.tested.items() if same], [s for s, same in sizes.tested.items() if not same]
    return [sizes.smallest, sizes.dense, list(sizes.larger), sizes.call_cost, *tested]


def _known(found: Any) -> Known:
    slots = [
        TensorSpec(heads, dim, _DTYPES[dtype], torch.device(device)) for heads, dim, dtype, device in found["layout"]
    ]
    choices = {}
    for name, (smallest, dense, larger, cost, same, other, packed) in found["choices"].items():
        tested = {**dict.fromkeys(same, True), **dict.fromkeys(other, False)}
        choices[name] = RowSizes(smallest, dense, tuple(larger), cost, None, tested), packed
    tiles = KnownTiles(found["granule"], choices) if found["granule"] is not None else None
    states = [
        StateSpec(layer, kind, index, tuple(shape), _DTYPES[dtype], torch.device(device))
        for layer, kind, index, shape, dtype, device in found["states"]
    ]
    layout = KVLayout(tuple(slots), tuple(found["without_kv"]), tuple(states), tuple(found["indexed"]))
    return Known(layout, tiles)


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _is_its_own(model: Any) -> bool:
    """Whether nobody has changed what its modules do, but for us: the key of KV knows nothing of that."""
    modules = list(model.modules())
    given = [*(vars(module)["forward"] for module in modules if "forward" in vars(module)), *hooks_of(modules)]
    return all(getattr(one, "__globals__", {}).get("__name__", "").startswith("kvboost.") for one in given)


def _depends_on(model: Any, fields: Mapping[str, str], settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        **fields,
        "format": _FORMAT,
        "attention": str(model.config._attn_implementation),
        "settings": settings,
        "kvboost": _digest([resources.files("kvboost.hf").joinpath(name).read_text("utf-8") for name in _DECIDE]),
        "modules": _digest(
            [
                (path, type(module).__qualname__, type(module).forward.__module__, _placed(module))
                for path, module in model.named_modules()
            ]
        ),
        "variables": sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES)),
        "cores": os.cpu_count(),
    }
    weight = model.get_input_embeddings().weight
    if weight.device.type == "cpu":
        found["kernels"] = _kernel_bits(weight.dtype)
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]  # as it is read back


def _placed(module: Any) -> list[Any]:
    return [
        (name, str(weight.dtype), list(weight.shape), str(weight.device))
        for name, weight in module.named_parameters(recurse=False)
    ]


@torch.no_grad()
def _kernel_bits(dtype: torch.dtype) -> str:
    """A digest of what kernels make of a little data whose sums are zero but for rounding."""
    rows, weights = (tensor.to(dtype) for tensor in cancelling(_INPUTS, _OUTPUTS))
    hasher = hashlib.sha256()
    for found in (*(linear(rows[:size], weights) for size in _SIZES), *attention_bits(dtype)):
        hasher.update(found.contiguous().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


_BAR = "preparing the model: {desc} ({n} of {total} done, {elapsed})"


class Measured(NamedTuple):
    """What was found."""

    facts: ModelFacts
    numerics: ChosenNumerics
    identity: ModelIdentity


def measure_model(model: Any, *, numerics: Numerics | None, packed_bytes: int | None = None) -> Measured:
    """Run ``model`` on short prompts and hash its weights. Raises UnsupportedModelError if it allows no reuse.

    What an earlier start found of the same model on the same machine is not found again.
    """
    hidden = None if is_progress_bar_enabled() else True  # None: also where nobody looks, as in a log file
    with tqdm(total=3, bar_format=_BAR, delay=1, mininterval=0, leave=False, disable=hidden) as bar:
        bar.set_description_str("hashing its weights", refresh=False)
        identity = ModelIdentity(model)
        before = identity.snapshot().fields
        budget = budget_to_pack(model) if packed_bytes is None else packed_bytes
        kept = KeptMeasurement(model, before, [numerics, budget])
        known = kept.read()
        _begin(bar, "running it on a short prompt")
        facts = probe_model(model, layout=known.layout if known is not None else None)
        _begin(bar, "testing how its kernels round")
        chosen = choose_numerics(
            model,
            facts.layout,
            shape_of(model, facts.layout),
            numerics=numerics,
            packed_bytes=budget,
            known=known.tiles if known is not None else None,
        )
        identity.measured(facts.layout, steps=chosen.spec)
        # A model that makes buffers when it first runs must run at every start.
        if known is None and identity.snapshot().fields["weights"] == before["weights"]:
            kept.write(facts.layout, chosen.tiles)
    return Measured(facts, chosen, identity)


def _begin(bar: Any, what: str) -> None:
    bar.set_description_str(what, refresh=False)
    bar.update()
