"""The settings of torch and of the machine that change rounding, and the kernels that attention may choose from.

Used by the fingerprint. Devices count by what they are, not by their number: KV of one A100 serves the next. The CPU
counts only for a model that is on it, and an accelerator's libraries only for a model that is there. Around everything
that runs the model :func:`pinned_sdpa` leaves out cuDNN's attention on an accelerator: it builds a plan for every shape
in every thread, which takes longer than a step. Invariant: the kernels named in the key are those allowed in the
forward, whoever asks, inside a forward or outside.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

_PROPERTIES = ("name", "major", "minor", "multi_processor_count", "gcnArchName", "gpu_eu_count")
_CPU_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
_GPU_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
# cuBLAS comes in wheels of its own. The others bring kernels that Transformers chooses once they are installed; it
# imports them with the first forward, so the installed packages count, not the imported ones.
_PACKAGES = (
    "nvidia-cublas",
    "nvidia-cublas-cu11",
    "nvidia-cublas-cu12",
    "nvidia-cublas-cu13",
    "flash-attn",
    "flash-attn-3",
    "kernels",
    "triton",
    "xformers",
)
_SDPA_FLAGS = ("flash_sdp_enabled", "math_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled")
_MATMUL_FLAGS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


class NumericEnvironment:
    """The machine and the settings of torch for the devices of one model."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        devices = set(devices)
        self._kinds = sorted({device.type for device in devices})
        self._fixed = [f"torch={torch.__version__}", f"transformers={transformers.__version__}"]
        self._fixed += sorted({_describe(device) for device in devices if device.type != "cpu"})
        if self._on_cpu:
            self._fixed += describe_cpu()
        if self._on_accelerator:
            self._fixed += _accelerator_libraries()

    @property
    def _on_cpu(self) -> bool:
        return "cpu" in self._kinds

    @property
    def _on_accelerator(self) -> bool:
        return self._kinds != ["cpu"]

    def settings(self) -> str:
        """The current settings. Cheap: only what can change is queried again."""
        found = [
            *self._fixed,
            f"deterministic={torch.are_deterministic_algorithms_enabled()}",
            f"autocast={[(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in self._kinds]}",
        ]
        if self._on_cpu:
            found += _cpu_settings()
        if self._on_accelerator:
            found += [*_accelerator_settings(), f"sdpa-pinned={[backend.name for backend in allowed_backends()]}"]
        else:
            found.append(_sdpa_backends())
        return "|".join(found)


def _describe(device: torch.device) -> str:
    """An accelerator's kind, name, capability and number of multiprocessors."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    if properties is None:  # its kernels come with the system
        return f"{device.type}={platform.platform()}"
    found = properties(device)
    return f"{device.type}={[getattr(found, name, None) for name in _PROPERTIES]}"


def describe_cpu() -> list[str]:
    """Instruction sets and libraries, by which kernels are chosen."""
    mkl: Any = torch.backends.mkl
    found = [f"cpu={torch.backends.cpu.get_cpu_capability()}", f"mkl={mkl.is_available()}"]
    if capabilities := getattr(torch.cpu, "get_capabilities", None):  # AMX among them
        supported = {name: value for name, value in capabilities().items() if not name.startswith("num_")}
        found.append(f"capabilities={sorted((name, value) for name, value in supported.items() if value)}")
    else:
        found.append(f"amx={torch.cpu._is_amx_tile_supported()}")
    build = torch.__config__.show().splitlines()
    found += [line.strip(" -") for line in build if "Math Kernel Library" in line or "MKL-DNN" in line]
    return [*found, *_variables(_CPU_VARIABLES)]


def _cpu_settings() -> list[str]:
    onednn: Any = torch.backends.mkldnn
    return [
        f"threads={torch.get_num_threads()}",
        f"mkldnn={bool(onednn.enabled)},{bool(getattr(onednn, 'deterministic', False))}",
        f"mkldnn-fp32={_fp32_precision(onednn)}",
    ]


def _accelerator_libraries() -> list[str]:
    cudnn: Any = torch.backends.cudnn
    found = [f"cuda={torch.version.cuda}", f"hip={torch.version.hip}", f"cudnn={cudnn.version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package}={metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return [*found, *_variables(_GPU_VARIABLES)]


def _accelerator_settings() -> list[str]:
    backends: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    return [
        f"matmul={[bool(getattr(backends.matmul, name, False)) for name in _MATMUL_FLAGS]}",
        f"matmul-fp32={_fp32_precision(backends)}",
        f"blas={backends.preferred_blas_library()}",
        f"cudnn={[bool(cudnn.enabled), bool(cudnn.benchmark), bool(cudnn.deterministic)]}",
    ]


def _fp32_precision(backend: Any) -> str:
    """How float32 is multiplied there: the same value for the same kernels, whichever torch setting was used."""
    precision = getattr(backend.matmul, "fp32_precision", None) if hasattr(backend, "matmul") else None
    if precision is None:  # before torch 2.9; since then this raises if the newer way was used
        return f"{torch.get_float32_matmul_precision()},{torch.backends.cuda.matmul.allow_tf32}"
    return "ieee" if precision == "none" else str(precision)


def _sdpa_backends() -> str:
    """Which kernels scaled_dot_product_attention may choose from, in which order; the CPU follows the flags too."""
    backends: Any = torch.backends.cuda  # untyped in torch
    order: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
    return f"sdpa={[bool(getattr(backends, name)()) for name in _SDPA_FLAGS]},{[int(kernel) for kernel in order]}"


def _variables(names: Iterable[str]) -> list[str]:
    return [f"{name}={os.environ[name]}" for name in names if name in os.environ]


_FLAGS = {
    SDPBackend.FLASH_ATTENTION: "flash_sdp_enabled",
    SDPBackend.EFFICIENT_ATTENTION: "mem_efficient_sdp_enabled",
    SDPBackend.MATH: "math_sdp_enabled",
}


def allowed_backends() -> list[SDPBackend]:
    """What the user has not switched off, in the user's order, without cuDNN; all others if that leaves nothing."""
    flags: Any = torch.backends.cuda  # untyped in torch
    enabled: list[Any] = [backend for backend, flag in _FLAGS.items() if getattr(flags, flag)()] or list(_FLAGS)
    # The kernel that a device brings along is XPU's first choice; CUDA has none. Torch has no public name for its flag.
    if getattr(torch._C, "_get_overrideable_sdp_enabled", bool)():
        enabled.append(SDPBackend.OVERRIDEABLE)
    order: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
    return sorted(enabled, key=lambda backend: order.index(int(backend)) if int(backend) in order else 0)


class _Pins:
    """Who is inside, over all threads: torch keeps the choice for the process. The last to leave puts it back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.context: Any = None


_pins = _Pins()


@contextmanager
def pinned_sdpa(devices: Iterable[torch.device]) -> Iterator[None]:
    """Within this block only :func:`allowed_backends` are used. Changes nothing for a model on the CPU."""
    if all(device.type in ("cpu", "meta") for device in devices):  # meta: weights that are streamed from the disk
        yield
        return
    with _pins.lock:
        if _pins.inside == 0:
            _pins.context = sdpa_kernel(allowed_backends())
            _pins.context.__enter__()
        _pins.inside += 1
    try:
        yield
    finally:
        with _pins.lock:
            _pins.inside -= 1
            if _pins.inside == 0:
                _pins.context.__exit__(None, None, None)
                _pins.context = None
