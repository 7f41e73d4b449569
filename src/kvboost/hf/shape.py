"""A model's shape and the bytes of its weights, of a loaded model or of a folder whose weights stay on the disk.

Asked by the engine's memory plan. Invariant: a folder and the model loaded from it have the same shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from kvboost.approx.recompute import attention_windows
from kvboost.capacity import ModelShape, WeightMemory
from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.hf.codec import codec_for
from kvboost.hf.probe import max_positions_of
from kvboost.offload.weights import WeightPlan, plan_weights, streamer_of
from kvboost.offload.weights.load import checkpoint_files, dtype_asked_for
from kvboost.offload.weights.shards import Shards
from kvboost.offload.weights.skeleton import Skeleton, build_skeleton

_SAMPLE_TOKENS = 64  # the 4-bit codec keeps one mean for so many


@dataclass(frozen=True)
class ModelOnDisk:
    """What a model would be, had it been loaded."""

    shape: ModelShape
    layout: KVLayout
    weights: WeightMemory
    attention: str
    dtype: torch.dtype
    files: tuple[Path, ...]
    _skeleton: Skeleton

    def streamed(self, budget: int) -> WeightMemory | None:
        """Where the weights would be with this budget; None if it is too small for this model."""
        try:
            return self.streamed_or_raise(budget)
        except ConfigError:
            return None

    def streamed_or_raise(self, budget: int) -> WeightMemory:
        """Where the weights would be with this budget. Raises ConfigError with the least if it is too small."""
        skeleton = self._skeleton
        if skeleton.total_bytes <= budget:
            return self.weights
        return _of_plan(plan_weights(skeleton.rest, skeleton.slabs, budget=budget))


def model_on_disk(source: str, *, dtype: Any = "auto", device: str = "cpu") -> ModelOnDisk:
    """The model of a folder or a hub name, built without its weights. Raises ConfigError for what cannot be planned."""
    path = Path(source).expanduser()
    if source.startswith((".", "/", "~")) and not path.exists():
        raise ConfigError(f"there is no model folder at {source}; check the path, or give a model's hub name")
    name = str(path) if path.exists() else source
    try:
        config = AutoConfig.from_pretrained(name)
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"cannot plan {source!r}: its weights are quantised, which is not planned so far")
        files = checkpoint_files(name)
        shards = Shards(files)
        kind = dtype_asked_for(dtype, config, shards)
        skeleton = build_skeleton(config, dtype=kind)
        layout = layout_of_config(config, dtype=kind, device=torch.device(device))
        shape = shape_of(skeleton.model, layout)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # Transformers raises either for a folder that lacks files
        raise ConfigError(f"cannot plan {source!r}: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"{config.model_type} has no heads and layers to plan with ({error})") from error
    stored = {tensor.dtype for tensor in shards.tensors.values()}
    weights = WeightMemory(
        resident=skeleton.total_bytes,
        largest=_largest(skeleton.model.parameters()),
        converted_from=sum(file.stat().st_size for file in files) if stored != {kind} else 0,
    )
    attention = str(skeleton.model.config._attn_implementation)
    return ModelOnDisk(shape, layout, weights, attention, kind, tuple(files), skeleton)


def shape_of(model: Any, layout: KVLayout) -> ModelShape:
    """The shape of a model, loaded or not."""
    config = model.config.get_text_config(decoder=True)
    heads, dim = _heads(config)
    layers = len(layout.slots) // 2
    keys = layout.slots[0]
    embedding = model.get_input_embeddings().weight
    inside = sum(p.numel() for p in model.parameters() if p.dim() > 1) - embedding.numel()
    head = model.get_output_embeddings()
    if head is not None and head.weight is embedding:
        inside += embedding.numel()  # one matrix for both: the vocabulary is multiplied with, too
    return ModelShape(
        layers=layers,
        hidden=int(config.hidden_size),
        intermediate=_intermediate(config),
        vocab=int(embedding.shape[0]),
        heads=heads,
        kv_heads=keys.heads,
        head_dim=max(dim, keys.dim),
        element=keys.dtype.itemsize,
        parameters=inside,
        kv_per_token=layout.bytes_per_token,
        windows=_windows(model, config, layers),
        masks=model.config._attn_implementation == "sdpa",
        max_positions=max_positions_of(config),
        lazy=keys.device.type == "cpu",
    )


def weights_of(model: Any) -> WeightMemory:
    """Where a loaded model's weights are."""
    streamer = streamer_of(model)
    if streamer is not None:
        return _of_plan(streamer.plan)
    unique = {id(p): p for p in (*model.parameters(), *model.buffers())}.values()
    return WeightMemory(sum(p.numel() * p.element_size() for p in unique), largest=_largest(unique))


def _of_plan(plan: WeightPlan) -> WeightMemory:
    buffers = plan.peak_bytes - plan.resident_bytes
    return WeightMemory(plan.resident_bytes, buffers, plan.streamed_bytes, plan.buffer_bytes)


def stored_bytes_per_token(layout: KVLayout) -> dict[int, int]:
    """What a token takes in the store, by bits: measured on a small block, as the codec packs it."""
    told: dict[int, int] = {}
    for bits in (16, 8, 4):
        block = [
            torch.zeros(len(slots), spec.heads, _SAMPLE_TOKENS, spec.dim, dtype=spec.dtype, device=spec.device)
            for spec, slots in layout.groups.items()
        ]
        # Not where a text begins: the first row, which the 4-bit codec keeps as it is, is one in many.
        packed = codec_for(bits, layout).pack(block, start=_SAMPLE_TOKENS)
        told[bits] = -(-sum(t.numel() * t.element_size() for t in packed) // _SAMPLE_TOKENS)
    return told


def layout_of_config(config: Any, *, dtype: torch.dtype, device: torch.device) -> KVLayout:
    """The KV layout a config promises; what a loaded model really keeps is found by running it."""
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{config.model_type} reads its prompt with an encoder; give a decoder-only model")
    heads, dim = _heads(text)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    slot = TensorSpec(int(kv_heads), dim, dtype, device)
    return KVLayout((slot,) * (2 * int(text.num_hidden_layers)))


def _heads(config: Any) -> tuple[int, int]:
    heads = int(config.num_attention_heads)
    return heads, int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _intermediate(config: Any) -> int:
    """Numbers a token has inside an MLP, at most: of all experts it is sent to."""
    wide = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    if not getattr(config, "num_experts_per_tok", None):
        return int(wide)
    return int(getattr(config, "moe_intermediate_size", None) or wide) * int(config.num_experts_per_tok)


def _windows(model: Any, config: Any, layers: int) -> tuple[int | None, ...]:
    try:
        windows = attention_windows(model)
    except UnsupportedModelError:
        return (None,) * layers  # the most that can be
    kinds = getattr(config, "layer_types", None) or ["all"] * layers
    return tuple(windows[kind] for kind in kinds)[:layers]


def _largest(tensors: Iterable[torch.Tensor]) -> int:
    return max((t.numel() * t.element_size() for t in tensors), default=0)
