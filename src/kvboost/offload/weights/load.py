"""Loads a model whose weights need not fit into memory, or says what it would be without reading them.

Called by the engine and by memory estimates. Invariants: the model computes what the resident one computes, to the bit,
as its weights are the same bytes in the same shapes, and is the resident one when everything fits; a folder and the
model loaded from it have the same shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig
from transformers.utils.hub import cached_file

from kvboost.capacity import ModelShape, WeightMemory
from kvboost.direct_io import up_to_page
from kvboost.errors import ConfigError
from kvboost.hf.cache import KVLayout
from kvboost.hf.checkpoint import Shards, checkpoint_files, sample_pages
from kvboost.hf.device_memory import memory_available
from kvboost.hf.loading import ModelSource, load_checkpoint, load_resident, load_tokenizer, loading_errors
from kvboost.hf.shape import layout_of_config, shape_of
from kvboost.hf.streams import has_streams
from kvboost.offload.weights.link import AcceleratorLink, Extent, FileSource, HostLink, HostSource, Link, Source
from kvboost.offload.weights.skeleton import Skeleton, WeightPlacement, build_skeleton, place_weights
from kvboost.offload.weights.slabs import Pieces, SlabFolder, make_slabs
from kvboost.offload.weights.streamer import WeightStreamer

_PIECE = 8 * 2**20  # bytes
_GGUF_PARTS = 256  # of which pages are sampled: where its tensors begin only a library could say
# What a model's class or files are found by. Everything else would change how weights are loaded.
_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
_ALLOWED = (*_HUB, "trust_remote_code", "attn_implementation", "gguf_file")


def load_model(
    source: ModelSource, *, weight_budget: int | None = None, weight_dir: str | Path | None = None
) -> tuple[Any, Any]:
    """The model in eval mode on its device, and its tokenizer.

    With a ``weight_budget`` in bytes that its weights do not fit, it is streamed from files in ``weight_dir``.
    """
    tokenizer = load_tokenizer(source)  # first: a missing one should not cost the user a model load
    if weight_budget is not None:
        with loading_errors(source):
            streamed = load_streamed(source, budget=weight_budget, weight_dir=weight_dir)
        if streamed is not None:
            return streamed, tokenizer
    return load_resident(source), tokenizer


def load_streamed(source: ModelSource, *, budget: int, weight_dir: str | Path | None) -> Any | None:
    """The model with at most ``budget`` bytes of weights in memory; None if all of them fit without streaming."""
    arguments = source.model_kwargs
    if other := sorted(set(arguments) - set(_ALLOWED)):
        raise ConfigError(f"weight_budget does not go with {', '.join(other)}; leave one of them out")
    hub, gguf = _only(arguments, *_HUB), _only(arguments, "gguf_file")
    config = AutoConfig.from_pretrained(source.path, **hub, **gguf, **_only(arguments, "trust_remote_code"))
    files = checkpoint_files(source.path, gguf.get("gguf_file"), hub)
    shards = Shards(files) if not gguf else None
    device = source.torch_device
    if device.type != "cpu" and not has_streams(device):
        raise ConfigError(f"a weight_budget copies on a second stream, which {device} has not; give device='cpu'")
    if getattr(config, "quantization_config", None) is not None and shards is not None:
        raise ConfigError("a weight_budget takes whole weights and GGUF, and these are packed; leave weight_budget out")
    dtype = dtype_asked_for(source.dtype, config, shards)
    made_with = _only(arguments, "attn_implementation", "trust_remote_code")
    skeleton = build_skeleton(config, dtype=dtype, **made_with)
    if skeleton.total_bytes <= budget:
        return None
    placement = place_weights(skeleton.rest, skeleton.slabs, budget=budget)  # before anything is written
    key = hashlib.sha256(f"{_key(files, shards)}|{dtype}".encode()).hexdigest()
    where = Path(weight_dir).expanduser() if weight_dir is not None else files[0].parent
    slabs = [skeleton.rest, *skeleton.slabs]
    pieces = _pieces(skeleton, shards, source)
    folder = make_slabs(where / f"kvboost-weights-{key[:16]}", slabs, pieces=pieces, key=key)
    link: Link = HostLink(budget=budget) if device.type == "cpu" else AcceleratorLink(device, budget=budget)
    put_together(skeleton, folder, placement, link=link, device=device)
    _take_generation_config(skeleton.model, source.path, hub)
    return skeleton.model


def put_together(
    skeleton: Skeleton, folder: SlabFolder, placement: WeightPlacement, *, link: Link, device: torch.device
) -> WeightStreamer:
    """Put what stays into memory and the hooks onto the model. The link and the folder are closed with the model."""
    files = FileSource(folder)
    try:
        memory = link.allocate(skeleton.rest.size)
        extent = Extent(skeleton.rest.name, 0, up_to_page(skeleton.rest.size))
        link.wait(link.copy(files, extent, memory, after=link.event()))
        for weight in skeleton.rest.weights:
            skeleton.put(weight.name, weight.view(memory))
        _move_buffers(skeleton.model, device)
        source: Source = files
        if device.type != "cpu" and placement.memory.streamed <= memory_available() // 2:
            source = HostSource(folder, device)
        streamer = WeightStreamer(skeleton.model, placement=placement, link=link, source=source, folder=folder)
    except BaseException:
        link.close()
        folder.close()
        raise
    streamer.attach(skeleton.model, skeleton.layers)
    return streamer


def _pieces(skeleton: Skeleton, shards: Shards | None, source: ModelSource) -> Pieces:
    """Where the slabs' bytes come from: the checkpoint's files, or the model as Transformers loads it.

    The latter for checkpoints whose tensors are not the model's own (GGUF, older names), once, to make the slabs.
    """
    weights = {weight.name: weight for slab in (skeleton.rest, *skeleton.slabs) for weight in slab.weights}
    if shards is not None:
        tensors = shards.tensors
        stored = {name: [a for a in skeleton.aliases[name] if a in tensors] for name in weights}

        def from_files(name: str) -> Iterable[memoryview]:
            return shards.pieces(stored[name][0], weights[name].dtype)

        # Tied weights that a checkpoint holds twice are Transformers' business: it may untie them.
        if all(len(s) == 1 and tensors[s[0]].shape == weights[n].shape for n, s in stored.items()):
            return from_files
    loaded: dict[str, torch.Tensor] = {}

    def from_model(name: str) -> Iterable[memoryview]:
        if not loaded:
            loaded.update(_state(load_checkpoint(source), skeleton))
        return _tensor_pieces(loaded[name].to(weights[name].dtype))

    return from_model


def _state(model: Any, skeleton: Skeleton) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = model.state_dict()
    for names in skeleton.aliases.values():
        if any(name not in state or state[name].data_ptr() != state[names[0]].data_ptr() for name in names):
            raise ConfigError(
                f"this checkpoint does not share {' and '.join(names)} as its config says, which cannot be streamed; "
                "leave weight_budget out"
            )
    return state


def _tensor_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _PIECE):
        yield memoryview(flat[start : start + _PIECE].numpy())  # type: ignore[arg-type]


def _key(files: list[Path], shards: Shards | None) -> str:
    if shards is not None:
        return shards.key
    (file,) = files
    size = file.stat().st_size
    parts = [(size * number // _GGUF_PARTS, size * (number + 1) // _GGUF_PARTS) for number in range(_GGUF_PARTS)]
    return str((file.name, size, file.stat().st_mtime_ns, sample_pages(file, parts)))


def dtype_asked_for(asked: Any, config: Any, shards: Shards | None) -> torch.dtype:
    """As Transformers decides it."""
    if isinstance(asked, str) and asked != "auto":
        asked = getattr(torch, asked, None)
        if not isinstance(asked, torch.dtype):
            raise ConfigError("dtype is not one torch knows; give 'auto', 'bfloat16' or torch.bfloat16, for example")
    if isinstance(asked, torch.dtype):
        return asked
    default = getattr(config, "dtype", None) if asked == "auto" else torch.float32
    if isinstance(default, str):
        default = getattr(torch, default)
    if isinstance(default, torch.dtype):
        return default
    stored = (tensor.dtype for tensor in shards.tensors.values()) if shards is not None else iter(())
    return next((dtype for dtype in stored if dtype.is_floating_point), torch.float32)


def _move_buffers(model: Any, device: torch.device) -> None:
    """Move what the model's code made itself to where the weights are."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                raise ConfigError(
                    f"{type(module).__name__}.{key} cannot be made without its weights; leave weight_budget out"
                )
            if buffer is not None:
                module._buffers[key] = buffer.to(device)


def _take_generation_config(model: Any, source: str, hub: dict[str, Any]) -> None:
    found = cached_file(source, "generation_config.json", _raise_exceptions_for_missing_entries=False, **hub)
    if found is not None:
        model.generation_config = GenerationConfig.from_pretrained(Path(found).parent)


def _only(arguments: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: arguments[name] for name in names if name in arguments}


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
