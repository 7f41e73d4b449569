"""The attention kernels of a forward are pinned on an accelerator, and the key names them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend

from kvboost.engine.parts import _running
from kvboost.hf import environment
from kvboost.hf.environment import NumericEnvironment
from kvboost.hf.sdpa import allowed_backends, pinned_sdpa

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
    assert "sdpa-pinned=['FLASH_ATTENTION', 'EFFICIENT_ATTENTION', 'MATH']" in outside
    with pinned_sdpa([_CUDA]):
        assert settings() == outside
    torch.backends.cuda.enable_cudnn_sdp(False)
    assert settings() == outside  # it was not used anyway
    torch.backends.cuda.enable_flash_sdp(False)
    assert settings() != outside
    assert allowed_backends() == [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def test_whatever_runs_the_model_runs_it_with_pinned_kernels() -> None:
    for adapters in (None, _Adapters()):
        with _running(adapters, nullcontext(), {_CUDA}):  # type: ignore[arg-type]
            assert not _flags()[3]
        assert _flags()[3]


class _Adapters:
    def using(self, adapter: object) -> nullcontext[None]:
        return nullcontext()
