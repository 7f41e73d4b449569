"""What a model would be, had it been loaded: built from its config and the headers of its files.

Used by memory estimates. Invariants: no weights are read; a folder and the model loaded from it have the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from kvboost.capacity import ModelShape, WeightMemory
from kvboost.errors import ConfigError
from kvboost.hf.cache import KVLayout
from kvboost.hf.checkpoint import Shards, checkpoint_files
from kvboost.hf.loading import ModelSource
from kvboost.hf.shape import layout_of_config, shape_of
from kvboost.offload.weights.load import dtype_asked_for
from kvboost.offload.weights.placement import place_weights
from kvboost.offload.weights.skeleton import Skeleton, build_skeleton


@dataclass(frozen=True)
class ModelOnDisk:
    """A model whose weights stay on disk."""

    shape: ModelShape
    layout: KVLayout
    weights: WeightMemory
    attention: str
    dtype: torch.dtype
    files: tuple[Path, ...]
    _skeleton: Skeleton

    def streamed(self, budget: int) -> WeightMemory:
        """Where the weights would be with this budget. Raises ConfigError with the minimum if it is too small."""
        if self._skeleton.total_bytes <= budget:
            return self.weights
        return place_weights(self._skeleton.rest, self._skeleton.slabs, budget=budget).memory


def model_on_disk(source: ModelSource) -> ModelOnDisk:
    """The model, built without its weights. Raises ConfigError for a model that cannot be estimated."""
    try:
        config = AutoConfig.from_pretrained(source.path)
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"cannot estimate {source.name!r}: its weights are quantised, which is not built so far")
        files = checkpoint_files(source.path)
        shards = Shards(files)
        dtype = dtype_asked_for(source.dtype, config, shards)
        skeleton = build_skeleton(config, dtype=dtype)
        layout = layout_of_config(config, dtype=dtype, device=source.torch_device)
        shape = shape_of(skeleton.model, layout)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # Transformers raises either for a folder that lacks files
        raise ConfigError(f"cannot estimate {source.name!r}: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"{config.model_type} does not say how many heads and layers it has ({error})") from error
    stored = {tensor.dtype for tensor in shards.tensors.values()}
    weights = WeightMemory(
        resident=skeleton.total_bytes,
        converted_from=sum(file.stat().st_size for file in files) if stored != {dtype} else 0,
    )
    attention = str(skeleton.model.config._attn_implementation)
    return ModelOnDisk(shape, layout, weights, attention, dtype, tuple(files), skeleton)
