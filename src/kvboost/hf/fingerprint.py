"""What makes a model's KV its own: a digest of weights, config, RoPE, adapters and numeric settings.

Called by the engine before keys are made. The expensive part (hashing the weights) is repeated only when
a weight tensor was written to or exchanged since.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import transformers

from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import KVLayout
from kvboost.hf.digests import weight_hasher
from kvboost.hf.weights import StreamedWeights, streamed_weights_of

# Raise when a change to this package changes how KV is computed.
_NUMERICS_VERSION = 1
# Say nothing about the numbers: where the files lay, and who wrote them.
_CONFIG_NOISE = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype")
_HASH_PIECE = 16 * 2**20  # elements


class ModelIdentity:
    """Watches one model and names its present state."""

    def __init__(self, model: Any, layout: KVLayout) -> None:
        self._model = model
        self._layout = layout
        self._weights_state: tuple[Any, ...] = ()
        self._weights = ""
        self._config_and_rope = (_config_digest(model), _rope_digest(model))

    def state(self) -> tuple[Any, ...]:
        """A cheap value that changes whenever :meth:`fields` might. Compare before hashing anything."""
        return (
            _weights_state(self._model),
            self._model.config._attn_implementation,
            self._model.training,
            _adapter_state(self._model),
            self._numerics(),
        )

    def fields(self) -> dict[str, str]:
        """The fingerprint fields that the model decides."""
        state = _weights_state(self._model)
        if state != self._weights_state:
            self._weights, self._weights_state = _weights_digest(self._model), state
        config, rope = self._config_and_rope
        return {
            "weights": self._weights,
            "config": config,
            "rope": rope,
            "dtype": ",".join(sorted({str(spec.dtype) for spec in self._layout.slots})),
            "attention": f"{self._model.config._attn_implementation}|{_sdpa_backends()}",
            "adapter": _adapter_state(self._model),
            "numerics": f"kvboost-numerics={_NUMERICS_VERSION}|training={self._model.training}|{self._numerics()}",
        }

    def _numerics(self) -> str:
        experts = getattr(self._model.config, "_experts_implementation", None)
        devices = sorted({str(spec.device) for spec in self._layout.slots})
        return f"{_numeric_settings(devices)}|experts={experts}|{_sdpa_backends()}"


def _weight_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        # Tied weights count once; rotary tables are state of the module and have a field of their own.
        if id(tensor) not in seen and not name.endswith("inv_freq"):
            seen.add(id(tensor))
            yield name, tensor


def _weights_state(model: Any) -> tuple[Any, ...]:
    """Changes when a weight is written to, moved or exchanged. Runs on every request, hence no names."""
    streamer = streamed_weights_of(model)
    return tuple(
        # Inference tensors count no versions: a write to one of those goes unnoticed.
        (id(tensor), 0 if tensor.is_inference() else tensor._version, tensor.data_ptr())
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and not name.endswith("inv_freq")
        # What passes through a buffer is another tensor all the time, and never written to.
        if streamer is None or not streamer.holds(module, name)
    )


def _weights_digest(model: Any) -> str:
    """SHA-256 over every weight: name, type, shape, bytes. Hashing releases the GIL, so threads help."""

    streamer = streamed_weights_of(model)

    def one(item: tuple[str, torch.Tensor]) -> bytes:
        name, tensor = item
        if streamer is not None and (digest := _streamed_digest(model, streamer, name)) is not None:
            return digest
        hasher = weight_hasher(name, tensor.dtype, tensor.shape)
        flat = tensor.detach().contiguous().view(-1)
        for start in range(0, flat.numel(), _HASH_PIECE):  # so a GPU tensor never lies in host memory whole
            piece = flat[start : start + _HASH_PIECE].cpu().view(torch.uint8)
            hasher.update(piece.numpy().data)
        return hasher.digest()

    tensors = sorted(_weight_tensors(model), key=lambda item: item[0])
    try:
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
            return hashlib.sha256(b"".join(pool.map(one, tensors))).hexdigest()
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"the weights cannot be read to tell this model from others (offloaded or quantised? {error}). "
            "Pass strict=False to run it without reuse."
        ) from error


def _streamed_digest(model: Any, streamer: StreamedWeights, name: str) -> bytes | None:
    """The digest of a weight that is streamed: the same as if it were in memory. None if it is."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    return streamer.digest(module, key, name) if streamer.holds(module, key) else None


def _config_digest(model: Any) -> str:
    config = {k: v for k, v in model.config.to_dict().items() if k not in _CONFIG_NOISE}
    if (config.get("quantization_config") or {}).get("quant_method") == "gguf":
        del config["quantization_config"]  # unpacked at loading: the weights say it all, and the file's name nothing
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def _rope_digest(model: Any) -> str:
    """The rotary tables as loaded, which say more than their config: code and config made them together."""
    hasher = hashlib.sha256()
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key.endswith("inv_freq"):
                values = getattr(module, "original_inv_freq", buffer) if key == "inv_freq" else buffer
                hasher.update(f"{name}.{key}:{getattr(module, 'attention_scaling', 1.0)}".encode())
                hasher.update(values.detach().float().cpu().numpy().tobytes())
    return hasher.hexdigest()


def _adapter_state(model: Any) -> str:
    """Which PEFT adapters are active, and how strongly. Their weights are among the weights."""
    if "peft" not in sys.modules:
        return "none"
    from peft.tuners.tuners_utils import BaseTunerLayer

    parts = {
        f"{module.active_adapters}:{module.disable_adapters}:{module.merged_adapters}"
        f":{sorted(getattr(module, 'scaling', {}).items())}"
        for module in model.modules()
        if isinstance(module, BaseTunerLayer)
    }
    return "|".join(sorted(parts)) or "none"


def _sdpa_backends() -> str:
    """Which kernels scaled_dot_product_attention may choose from; the flags rule the CPU's choice too."""
    backends: Any = torch.backends.cuda  # untyped in torch
    names = ("flash_sdp_enabled", "math_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled")
    return f"sdpa={[bool(getattr(backends, name)()) for name in names]}"


def _numeric_settings(devices: list[str]) -> str:
    """Settings of torch and the machine that change how sums are rounded."""
    kinds = sorted({torch.device(device).type for device in devices})
    return "|".join(
        [
            f"torch={torch.__version__}",
            f"transformers={transformers.__version__}",
            f"threads={torch.get_num_threads()}",
            f"cpu={torch.backends.cpu.get_cpu_capability()}",
            f"mkldnn={torch.backends.mkldnn.enabled}",
            f"matmul={torch.get_float32_matmul_precision()}",
            f"deterministic={torch.are_deterministic_algorithms_enabled()}",
            f"devices={devices}",
            f"autocast={[(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]}",
        ]
    )
