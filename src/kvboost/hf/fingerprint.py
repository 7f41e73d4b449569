"""The identity of a model's KV: digests of weights, config, RoPE, adapters and numeric settings.

Called by the engine before keys are made. A snapshot is taken once per request. Invariant: a snapshot's fields
describe exactly the state it carries, whatever other threads do to the model meanwhile.

Not detected: a write through ``tensor.data`` (as PEFT's ``hotswap_adapter`` does, but see
:mod:`~kvboost.hf.peft_layers`) or to an inference tensor, and an adapter that another thread switches off
and on again between two checks. After such a change call :meth:`ModelIdentity.weights_changed`; let the engine switch
adapters.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import uuid
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from kvboost.errors import MovedModelError
from kvboost.hf.attention import registered
from kvboost.hf.cache import KVLayout
from kvboost.hf.code_digest import attention_code_digest, code_digest, model_code_digest
from kvboost.hf.environment import NumericEnvironment
from kvboost.hf.loaded_weights import claim_loaded
from kvboost.hf.packed_weights import settings_of_modules, settle, traces_of
from kvboost.hf.peft_layers import AdapterLayer, adapter_layers, merges_missed, plain_path
from kvboost.hf.weights import (
    ModuleTree,
    TensorStates,
    TensorWatch,
    Weight,
    digest_weights,
    streamed_weights_of,
    weights_by_owner,
)
from kvboost.types import ModelSnapshot

# Do not affect the numbers: where the files are, and what wrote them.
CONFIG_NOISE = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype")
_MAX_ATTEMPTS = 3
_models: list[ref[Any]] = []  # with an engine


class ModelState(NamedTuple):
    """A cheap value that changes whenever the fingerprint might."""

    changes: int
    """Number of calls of ``weights_changed``."""
    weights: TensorStates
    adapters: tuple[AdapterLayer, ...]
    attention: str
    attention_code: tuple[Any, ...]
    """Another function may come to be registered under the same name."""
    experts: str
    training: bool
    numerics: str


_FIELDS = ("weights", "config", "rope", "dtype", "attention", "adapter", "numerics")


class ModelIdentity:
    """Tracks one model and identifies its current state. Thread-safe."""

    def __init__(self, model: Any, layout: KVLayout | None = None, *, steps: str = "") -> None:
        """``steps`` names how the model is stepped through a prompt. Without a ``layout`` its weights stand in."""
        settle(model)
        self._model = model
        self._lock = threading.Lock()
        self._set_measured(layout, steps)
        self._tree, self._watch = ModuleTree(model), TensorWatch()
        self._changes = 0
        self._loaded = claim_loaded(model)
        self._merges_missed = merges_missed()
        self._experts = _experts(model)
        self._digests: dict[str | None, tuple[TensorStates, str]] = {}
        """The digests of the base model (None) and of each adapter, with the states they were made from."""
        self._config_and_rope = (_config_digest(model), _rope_digest(model))
        self._code = f"code={code_digest()},{model_code_digest(model)}"
        self._made_for = _place_and_type(model)
        if not _models:
            register_optimizer_step_post_hook(_stepped)
        _models.append(ref(model))

    def measured(self, layout: KVLayout, *, steps: str) -> None:
        """Call once it is known how the model's KV looks and how it is stepped; digests of its weights stay."""
        with self._lock:
            self._set_measured(layout, steps)

    def _set_measured(self, layout: KVLayout | None, steps: str) -> None:
        placed = [weight for weight in self._model.parameters() if weight.device.type != "meta"]
        specs = layout.slots if layout is not None else placed
        self._environment = NumericEnvironment(spec.device for spec in specs)
        self._dtypes, self._steps = sorted({str(spec.dtype) for spec in specs}), steps
        self._last: ModelSnapshot | None = None

    def snapshot(self) -> ModelSnapshot:
        """The model's current state and its fingerprint fields; the same object while nothing changes.

        A model that changes meanwhile gets a unique snapshot that is never current, so that its request finds nothing
        and stores nothing.
        """
        with self._lock:
            for _ in range(_MAX_ATTEMPTS):
                state = self._state_or_none()
                if state is None:
                    continue
                if self._last is not None and self._last.state == state:
                    return self._last
                fields = self._fields(state)
                # Weights may have been written, and adapters switched layer by layer, meanwhile.
                if self._state_or_none() == state:
                    self._watch.forget_all_but(state.weights)
                    self._last = ModelSnapshot(state, MappingProxyType(fields))
                    return self._last
            last = self._last.fields if self._last is not None else dict.fromkeys(_FIELDS, "")
            fields = {**last, "numerics": f"{last['numerics']}|changing={uuid.uuid4()}"}
            return ModelSnapshot(object(), MappingProxyType(fields))

    def is_current(self, snapshot: ModelSnapshot) -> bool:
        """Whether the model is still (or again) in the state of ``snapshot``."""
        return bool(self._state_or_none() == snapshot.state)

    def adapter_digest(self, name: str) -> str:
        """The digest of an adapter's tensors, independent of its name and whether it is active."""
        with self._lock:
            return self._digest(name, weights_by_owner(self._model).get(name, []))

    def weights_changed(self, adapter: str | None = None) -> None:
        """Drop the digests of all weights, or of one adapter's, after an undetectable change.

        Running requests store nothing more.
        """
        with self._lock:
            self._changes += 1
            self._experts = _experts(self._model)
            self._loaded = None
            if adapter is None:
                self._config_and_rope = (_config_digest(self._model), _rope_digest(self._model))
                self._digests.clear()
            else:
                self._digests.pop(adapter, None)

    def _state_or_none(self) -> ModelState | None:
        """The state; None while another thread adds or removes modules."""
        try:
            return self._state()
        except RuntimeError as error:
            if "changed size" not in str(error):
                raise
            return None

    def _state(self) -> ModelState:
        """One pass over the modules; it runs several times per request."""
        model, streamer = self._model, streamed_weights_of(self._model)
        if merges_missed() != self._merges_missed:
            increment_version(list(model.parameters()))
            self._merges_missed = merges_missed()
        adapters = adapter_layers(model, self._tree.modules())
        watched = [
            (module, tensor)
            for module, name, tensor in self._tree.tensors()
            # A streamed weight is a new tensor every time, and never written to.
            if not (name.endswith("inv_freq") or (streamer and streamer.holds(module, name)))
        ]
        return ModelState(
            self._changes,
            self._watch.states(traces_of(watched)),
            adapters,
            attention := str(model.config._attn_implementation),
            registered(attention),
            self._experts_to_prefill(),
            bool(model.training),
            self._environment.settings(),
        )

    def _fields(self, state: ModelState) -> dict[str, str]:
        """Derived from ``state`` alone, except for the weights' bytes."""
        if (now := _place_and_type(self._model)) != self._made_for:
            raise MovedModelError(
                f"this engine is of {self._made_for}, which is {now} now; make a new engine (or detach and attach)"
            )
        owned = weights_by_owner(self._model)
        config, rope = self._config_and_rope
        return {
            "weights": self._digest(None, owned[None]),
            "config": config,
            "rope": rope,
            "dtype": ",".join(self._dtypes),
            "attention": f"{state.attention}|code={attention_code_digest(state.attention)}",
            "adapter": self._adapter_field(state, owned),
            "numerics": f"{self._code}|training={state.training}|{state.numerics}"
            f"|experts={state.experts}|steps={self._steps}",
        }

    def _adapter_field(self, state: ModelState, owned: dict[str | None, list[Weight]]) -> str:
        """What the layers' adapters add to the base model: their tensors and how strongly, layer by layer."""
        hasher = hashlib.sha256()
        layers = [layer for layer in state.adapters if layer.merged or (layer.active and not layer.disabled)]
        names = {name for layer in layers for name in (*layer.merged, *layer.active)}
        digests = {name: self._digest(name, owned.get(name, [])) for name in names}
        for layer in layers:
            scaling = dict(layer.scaling)
            added = [[(digests[name], scaling.get(name)) for name in used] for used in (layer.merged, layer.active)]
            hasher.update(json.dumps([plain_path(layer.path), layer.kind, layer.disabled, *added]).encode())
        if not layers:
            return "none"
        hasher.update(sys.modules["peft"].__version__.encode())
        return hasher.hexdigest()

    def _digest(self, owner: str | None, weights: list[Weight]) -> str:
        streamer = streamed_weights_of(self._model)  # what it holds is not identified by tensors
        resident = [weight for weight in weights if not (streamer and streamer.holds(weight.module, weight.key))]
        states = self._watch.states(traces_of([(weight.module, weight.tensor) for weight in resident]))
        known = self._digests.get(owner)
        if known is None or known[0] != states:
            digests: dict[str, bytes | None] = {}
            loaded = self._loaded if owner is None else None
            if loaded is not None:
                self._loaded = None  # only for the first digest: later a hidden write may accompany a visible one
                digests = loaded.read(weights)
            known = self._digests[owner] = (states, digest_weights(self._model, weights, digests))
            if loaded is not None:
                loaded.keep(digests)
        return known[1]

    def _experts_to_prefill(self) -> str:
        """The experts' kernel that a prefill uses.

        Transformers switches it around its decode loop, in which chunks are stored; that is not a change. A user who
        switches it permanently calls :meth:`weights_changed`.
        """
        now = _experts(self._model)
        to_decode = self._experts.replace("grouped_mm", "batched_mm")
        if now != to_decode or not _switches_experts_to_decode(self._model):
            self._experts = now
        return self._experts


def _stepped(optimizer: Any, *_: Any) -> None:
    """Count a step as a write to what it trains: fused optimizers, the default of Transformers' Trainer, do not."""
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    for model in filter(None, [known() for known in _models]):
        increment_version([weight for weight in model.parameters() if id(weight) in trained])


def _place_and_type(model: Any) -> str:
    """Where the model computes and in which numbers: its KV was laid out for that."""
    weight = model.get_input_embeddings().weight
    return f"{weight.dtype} on {weight.device.type}"


def _experts(model: Any) -> str:
    """The kernels of a mixture of experts, of the model and of the models in it."""
    named = getattr(model, "get_experts_implementation", None)
    return json.dumps(named() if named is not None else None, sort_keys=True)


def _switches_experts_to_decode(model: Any) -> bool:
    """As in Transformers' ``_optimize_model_for_decode``."""
    return bool(model.device.type != "cpu")


def decoding_changes_prefill(model: Any) -> bool:
    """Whether one thread's decode loop changes the kernels of another's prefill: then requests must take turns."""
    return "grouped_mm" in _experts(model) and _switches_experts_to_decode(model)


def _config_digest(model: Any) -> str:
    config = {k: v for k, v in model.config.to_dict().items() if k not in CONFIG_NOISE}
    if (config.get("quantization_config") or {}).get("quant_method") == "gguf":
        del config["quantization_config"]  # unpacked at loading: the weights' digest covers it
    if settings := settings_of_modules(model):
        config["kvboost_module_settings"] = settings
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def _rope_digest(model: Any) -> str:
    """The digest of the loaded rotary tables, which cover both code and config."""
    hasher = hashlib.sha256()
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key.endswith("inv_freq"):
                values = getattr(module, "original_inv_freq", buffer) if key == "inv_freq" else buffer
                hasher.update(f"{plain_path(name)}.{key}:{getattr(module, 'attention_scaling', 1.0)}".encode())
                hasher.update(values.detach().float().cpu().numpy().tobytes())
    return hasher.hexdigest()
