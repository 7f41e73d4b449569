"""Which kernels ``scaled_dot_product_attention`` may choose from while our model runs.

Used around everything that runs the model, and by the numeric environment, which names them in the key. On an
accelerator cuDNN's attention is left out: it builds a plan for every shape in every thread, which takes longer than a
step. Invariant: the kernels named in the key are those allowed in the forward, whoever asks, inside a forward or
outside.

torch keeps the choice for the whole process. So the first to enter sets it and the last to leave puts it back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_FLAGS = {
    SDPBackend.FLASH_ATTENTION: "flash_sdp_enabled",
    SDPBackend.EFFICIENT_ATTENTION: "mem_efficient_sdp_enabled",
    SDPBackend.MATH: "math_sdp_enabled",
}


def allowed_backends() -> list[SDPBackend]:
    """What the user has not switched off, in the user's order, without cuDNN; all others if that leaves nothing."""
    flags: Any = torch.backends.cuda  # untyped in torch
    enabled = [backend for backend, flag in _FLAGS.items() if getattr(flags, flag)()]
    order: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
    return sorted(enabled or _FLAGS, key=lambda backend: order.index(int(backend)) if int(backend) in order else 0)


class _Pins:
    """Who is inside, over all threads: the choice is the process's own."""

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
