"""Measures what this machine does in a second: multiply, read weights from memory, read a file past the page cache.

Used to estimate speeds. Takes about a second in all. Invariant: nothing is left behind.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvboost.direct_io import DirectFile, page_aligned

_SECONDS = 0.25
_SIDE = 2048
_PIECE = 8 * 2**20  # bytes
_MAX_ROWS = 256  # longer steps multiply no faster


@dataclass(frozen=True)
class Rates:
    """What this machine does in a second, measured."""

    memory: float
    """Bytes of weights multiplied with one token's states: what decoding reads."""
    multiply: float
    """Multiplications and additions, with as many tokens as a step of prefill has."""
    disk: float
    """Bytes read past the page cache."""


@torch.no_grad()
def measure_rates(*, dtype: torch.dtype, device: torch.device, tokens: int, files: Sequence[Path]) -> Rates:
    """The rates for weights of this dtype and steps of so many tokens. The disk's is that of a large file."""
    tokens = min(tokens, _MAX_ROWS)
    # More than the processor's caches hold, so that every pass comes from memory.
    matrices = [torch.ones(_SIDE, _SIDE, dtype=dtype, device=device) for _ in range(16)]
    one, step = (torch.ones(count, _SIDE, dtype=dtype, device=device) for count in (1, tokens))

    def through_all(states: torch.Tensor) -> None:
        for matrix in matrices:
            torch.nn.functional.linear(states, matrix)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    memory = _per_second(lambda: through_all(one), sum(m.numel() * m.element_size() for m in matrices))
    multiply = _per_second(lambda: through_all(step), 2 * tokens * _SIDE * _SIDE * len(matrices))
    return Rates(memory=memory, multiply=multiply, disk=_disk_rate(files))


def _disk_rate(files: Sequence[Path]) -> float:
    """Bytes per second of the largest file; of one made for it where all are too small to tell."""
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    if largest is not None and largest.stat().st_size >= _PIECE:
        return _read_rate(largest)
    with tempfile.NamedTemporaryFile(prefix="kvboost-") as made:
        made.write(os.urandom(_PIECE))  # what a file system cannot compress
        made.flush()
        os.fsync(made.fileno())
        return _read_rate(Path(made.name))


def _read_rate(path: Path) -> float:
    """Bytes per second of this file, read from its beginning, past the page cache."""
    buffer = page_aligned(_PIECE)
    begun, read = time.perf_counter(), 0
    with DirectFile(path) as file:
        whole = file.size // _PIECE * _PIECE
        while (taken := time.perf_counter() - begun) < _SECONDS or not read:
            read += file.read(buffer, read % whole)
            taken = time.perf_counter() - begun
    return read / taken


def _per_second(work: Callable[[], None], amount: int) -> float:
    work()  # threads started, code loaded
    begun, done = time.perf_counter(), 0
    while time.perf_counter() - begun < _SECONDS or not done:
        work()
        done += 1
    return amount * done / (time.perf_counter() - begun)
