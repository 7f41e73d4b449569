"""Models at full size on fake CUDA tensors: every op is traced, nothing is computed, and no driver is needed.

For tests of what a request asks of a GPU. Needs torch's CUDA build (see ``.ci/gpu``). Within ``with FakeCuda() as
cuda`` all tensors are fake: reading a number of one raises, and so does mixing devices. Kernels are counted, views are
not. Attention runs in the kernel that torch chooses on an A100 or later; without a driver it would choose its slowest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM

from kvboost import KVBoost
from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.hf.measured import Measured
from kvboost.hf.numerics import choose_numerics
from kvboost.hf.probe import ModelFacts
from kvboost.hf.shape import shape_of
from kvboost.streams import BlockingStreams
from kvboost.types import ModelSnapshot

DEVICE = torch.device("cuda", 0)
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "lift_fresh", "device"}
_GIB = 2**30


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[0]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch's choice on a GPU: flash without a mask, else the kernel that takes one, whose keys have every head."""
    if isinstance(attn_mask, CausalBias):
        return CausalBias._dispatch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    assert enable_gqa or query.shape[1] == key.shape[1]
    if attn_mask is None:
        return _flash(query, key, value, is_causal, scale)
    assert query.shape[1] == key.shape[1], "the kernel with a mask takes no shared keys"
    if attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, False, scale=scale)[0]


def _lower_right(*shape: int) -> Any:
    """torch's own bias of this shape, which cannot be made where a mode watches ops."""
    with _disable_current_modes():
        return causal_lower_right(*shape)


@dataclass
class Trace:
    """The kernels and copies of some work, by name."""

    ops: Counter[str]
    copied: Counter[str]
    """Bytes that clones of a device's memory and the like write, by op."""
    peak_tensor: int
    """Bytes of the largest tensor that was made."""

    @property
    def total(self) -> int:
        """How many kernels and copies."""
        return self.ops.total()


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace(Counter(), Counter(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in _FREE:
            return result
        self.trace.ops[name] += 1
        made = (kwargs or {}).get("out", result)
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.trace.peak_tensor = max(self.trace.peak_tensor, tensor.nbytes)
                if name in ("clone", "copy_", "_to_copy", "cat", "split_with_sizes_copy"):
                    self.trace.copied[name] += tensor.nbytes
        return result


class _Identity:
    """A model whose weights nobody hashes: they are not there."""

    def snapshot(self) -> ModelSnapshot:
        fields = ("weights", "config", "rope", "dtype", "attention", "adapter", "numerics")
        return ModelSnapshot("fake", MappingProxyType(dict.fromkeys(fields, "fake")))

    def is_current(self, snapshot: ModelSnapshot) -> bool:
        return True


class FakeCuda:
    """A GPU of a given size that computes nothing."""

    def __init__(self, *, memory: int = 80 * _GIB, weights: int = 16 * _GIB) -> None:
        self._free, self._memory = memory - weights, memory
        self._stack = ExitStack()

    def __enter__(self) -> FakeCuda:
        properties = SimpleNamespace(
            name="fake", major=9, minor=0, multi_processor_count=132, total_memory=self._memory
        )
        patches = {
            "torch.cuda._lazy_init": None,
            "torch.cuda.get_device_properties": properties,
            "torch.cuda.mem_get_info": (self._free, self._memory),
            "torch.cuda.memory_reserved": 0,
            "torch.cuda.memory_allocated": 0,
            "torch.nn.attention.bias.can_use_flash_attention": True,
            "kvboost.hf.numerics.choose.probe_lower_right": None,  # it compares numbers
            "kvboost.hf.runner.timing_event": None,
        }
        for name, value in patches.items():
            self._stack.enter_context(mock.patch(name, return_value=value))
        self._stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", _attend))
        self._stack.enter_context(mock.patch("kvboost.engine.stores.streams_for", return_value=BlockingStreams()))
        self._stack.enter_context(mock.patch("kvboost.engine.assembly.measure_model", _measured))
        self._stack.enter_context(mock.patch("kvboost.hf.lower_right.causal_lower_right", _lower_right))
        self._stack.enter_context(FakeTensorMode())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def model(self, **config: Any) -> Any:
        """A model of this config in bfloat16, without numbers."""
        found = AutoConfig.for_model(**{**LLAMA_8B, **config})
        with torch.device(DEVICE):
            return AutoModelForCausalLM.from_config(found, dtype=torch.bfloat16).eval()

    def split(self, model: Any) -> Any:
        """The second half of its layers on another GPU, what they are given moved there as accelerate does."""
        second = torch.device("cuda", 1)

        def move(_: Any, args: Any, kwargs: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda tensor: tensor.to(second), (args, kwargs))

        decoder = model.get_decoder()
        for part in (*decoder.layers[len(decoder.layers) // 2 :], decoder.norm, model.lm_head):
            part.register_forward_pre_hook(move, with_kwargs=True)
            for module in part.modules():
                for name, weight in module._parameters.items():
                    if weight is not None:
                        module._parameters[name] = torch.nn.Parameter(weight.detach().to(second), False)
        return model

    def engine(self, model: Any, **settings: Any) -> KVBoost:
        """An engine around it that was not tried out."""
        return KVBoost(model, **{"host_cache_bytes": 0, **settings})

    def trace(self, work: Callable[[], Any]) -> Trace:
        """What ``work`` asks of the GPU."""
        recorder = _Recorder()
        with torch.no_grad(), recorder:
            work()
        return recorder.trace


def _measured(model: Any, *, numerics: Any, packed_bytes: int | None = None) -> Any:
    """As if the model had been run: what its config promises."""
    config = model.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    places = [next(layer.parameters()).device for layer in model.get_decoder().layers]
    slots = [TensorSpec(config.num_key_value_heads, dim, torch.bfloat16, place) for place in places for _ in "kv"]
    layout = KVLayout(tuple(slots))
    chosen = choose_numerics(model, layout, shape_of(model, layout), numerics=numerics)
    return Measured(ModelFacts(layout, config.max_position_embeddings, None, None), chosen, _Identity())
