"""Machines and settings that nobody here has, by what torch would say of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvboost.engine.parts import _running
from kvboost.hf import environment
from kvboost.hf.cache import KVLayout
from kvboost.hf.environment import NumericEnvironment, allowed_backends, pinned_sdpa
from kvboost.hf.fingerprint import ModelIdentity
from kvboost.hf.probe import probe_model
from tests.helpers.models import tiny_model

_A100 = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0, multi_processor_count=108)
_H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132)
_MODEL = tiny_model("llama")
_LAYOUT = probe_model(_MODEL).layout


def _numerics(*devices: str) -> str:
    slots = [replace(_LAYOUT.slots[i % len(_LAYOUT.slots)], device=torch.device(d)) for i, d in enumerate(devices)]
    return ModelIdentity(_MODEL, KVLayout(tuple(slots))).snapshot().fields["numerics"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(properties: Any = _A100) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)

    use()
    return use


def test_cuda_0_is_cuda_1(gpu: Callable[..., None]) -> None:
    assert _numerics("cuda:0") == _numerics("cuda:1") == _numerics("cuda:0", "cuda:1")
    assert _numerics("cuda:0") != _numerics("cpu")


@pytest.mark.parametrize(
    "other", [_H100, SimpleNamespace(**{**vars(_A100), "multi_processor_count": 98})], ids=["H100", "fewer SMs"]
)
def test_another_gpu_is_another_machine(gpu: Callable[..., None], other: Any) -> None:
    a100 = _numerics("cuda:0")
    gpu(other)
    assert _numerics("cuda:0") != a100


def _threads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "get_num_threads", lambda: 1234)


def _capability(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ALTIVEC")


def _amx(patch: pytest.MonkeyPatch) -> None:
    told = torch.cpu.get_capabilities()
    patch.setattr(torch.cpu, "get_capabilities", lambda: {**told, "amx_tile": not told.get("amx_tile")})


def _onednn_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.mkldnn, "enabled", False)


def _onednn_isa(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


@pytest.mark.parametrize("change", [_threads, _capability, _amx, _onednn_off, _onednn_isa])
def test_the_cpu_counts_on_a_cpu_alone(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    on_cpu, on_gpu, on_both = _numerics("cpu"), _numerics("cuda:0"), _numerics("cpu", "cuda:0")
    change(monkeypatch)
    assert _numerics("cpu") != on_cpu
    assert _numerics("cpu", "cuda:0") != on_both
    assert _numerics("cuda:0") == on_gpu


def _cuda(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "cuda", "12.9")


def _cudnn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.cudnn, "version", lambda: 91002)


def _packages(**found: str) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        def version(name: str) -> str:
            if name in found:
                return found[name]
            raise metadata.PackageNotFoundError(name)

        patch.setattr(metadata, "version", version)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _cuda,
        _cudnn,
        _packages(**{"nvidia-cublas-cu12": "12.8.4.1"}),
        _packages(**{"flash-attn": "2.8.3"}),
        _packages(xformers="0.0.33"),
        _packages(triton="3.5.0"),
        _packages(kernels="0.11"),
    ],
)
def test_an_accelerators_libraries_count_on_it_alone(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    _packages()(monkeypatch)
    on_cpu, on_gpu = _numerics("cpu"), _numerics("cuda:0")
    change(monkeypatch)
    assert _numerics("cuda:0") != on_gpu
    assert _numerics("cpu") == on_cpu


class _Set:
    """Sets a flag of torch for a while."""

    def __init__(self, holder: Any, name: str, value: Any) -> None:
        self._holder, self._name, self._value = holder, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._holder, self._name)
        setattr(self._holder, self._name, self._value)

    def __exit__(self, *error: Any) -> None:
        setattr(self._holder, self._name, self._before)


@pytest.mark.parametrize(
    "setting",
    [
        _Set(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        _Set(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        _Set(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
        _Set(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        _Set(torch.backends.cudnn, "deterministic", True),
        sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]),
    ],
)
def test_a_flag_of_the_accelerator_shows_at_once(
    gpu: Callable[..., None], setting: AbstractContextManager[Any]
) -> None:
    identity = ModelIdentity(_MODEL, KVLayout((replace(_LAYOUT.slots[0], device=torch.device("cuda:0")),)))
    before = identity.snapshot()
    with setting:
        assert not identity.is_current(before)
        assert identity.snapshot().fields["numerics"] != before.fields["numerics"]
    assert identity.snapshot().fields == before.fields


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_order_of_attention_kernels_shows(gpu: Callable[..., None], device: str) -> None:
    found = []
    for order in ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        with sdpa_kernel(order, set_priority=True):
            found.append(_numerics(device))
    assert found[0] != found[1]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_matmul_precision_shows_whichever_way_it_is_set(gpu: Callable[..., None], device: str) -> None:
    before = _numerics(device)
    torch.set_float32_matmul_precision("medium")
    try:
        assert _numerics(device) != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert _numerics(device) == before


def test_an_accelerator_that_tells_nothing_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert "mps" in _numerics("mps:0")


_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _flags() -> tuple[bool, bool, bool, bool]:
    backends = torch.backends.cuda
    return (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
    )


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    flash, efficient, math, cudnn = _flags()
    yield
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_math_sdp(math)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def test_cudnn_is_left_out_and_put_back() -> None:
    before = _flags()
    assert before[3]
    with pinned_sdpa([_CUDA]):
        assert _flags() == (True, True, True, False)
        with pinned_sdpa([_CUDA, _CPU]):
            assert not _flags()[3]
        assert not _flags()[3]
    assert _flags() == before
    with pinned_sdpa([_CPU]):
        assert _flags() == before


def test_what_the_user_switched_off_stays_off() -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    with pinned_sdpa([_CUDA]):
        assert _flags() == (False, True, True, False)
    assert _flags() == (False, True, True, True)


def test_the_kernel_that_a_device_brings_along_stays_in_the_users_order() -> None:
    """It is XPU's first choice."""
    xpu = torch.device("xpu", 0)
    with pinned_sdpa([xpu]):
        assert torch._C._get_overrideable_sdp_enabled()
        assert not _flags()[3]
    with sdpa_kernel([SDPBackend.OVERRIDEABLE, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        assert allowed_backends() == [SDPBackend.OVERRIDEABLE, SDPBackend.MATH]
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]), pinned_sdpa([xpu]):
        assert not torch._C._get_overrideable_sdp_enabled(), "the user switched it off"
    with sdpa_kernel([SDPBackend.OVERRIDEABLE, SDPBackend.CUDNN_ATTENTION]), pinned_sdpa([_CUDA]):
        assert _flags()[:3] == (True, True, True), "CUDA has no such kernel, and needs one"


def test_rocm_has_a_key_without_anything_of_cuda(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    gpu(SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304))
    found = _numerics("cuda:0")
    assert "hip=6.4.43482" in found
    assert "gfx942" in found


def test_a_thread_that_leaves_does_not_unpin_another() -> None:
    before, entered, leave = _flags(), threading.Event(), threading.Event()

    def other() -> None:
        with pinned_sdpa([_CUDA]):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with pinned_sdpa([_CUDA]):
        thread.start()
        entered.wait()
    assert not _flags()[3]  # the other one is still inside
    leave.set()
    thread.join()
    assert _flags() == before


def test_the_key_names_what_the_forward_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_describe", lambda device: "cuda=[test]")
    settings = NumericEnvironment([_CUDA]).settings
    outside = settings()
    assert "sdpa-pinned=['FLASH_ATTENTION', 'EFFICIENT_ATTENTION', 'MATH', 'OVERRIDEABLE']" in outside
    with pinned_sdpa([_CUDA]):
        assert settings() == outside
    torch.backends.cuda.enable_cudnn_sdp(False)
    assert settings() == outside  # it was not used anyway
    torch.backends.cuda.enable_flash_sdp(False)
    assert settings() != outside
    assert allowed_backends() == [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.OVERRIDEABLE]


def test_whatever_runs_the_model_runs_it_with_pinned_kernels() -> None:
    for adapters in (None, _Adapters()):
        with _running(adapters, nullcontext(), {_CUDA}):  # type: ignore[arg-type]
            assert not _flags()[3]
        assert _flags()[3]


class _Adapters:
    def using(self, adapter: object) -> nullcontext[None]:
        return nullcontext()
