"""Joins a Ray cluster, or starts a Ray of this process's own; and reads what its errors say.

Used by ``kvboost serve --ray`` and ``kvboost warm --ray``.
"""

from __future__ import annotations

import math
import os

import ray

_OBJECT_STORE_BYTES = 256 * 2**20  # requests, answers and paths pass through it, no KV does


def connect(*, cpus: float) -> None:
    """Join the cluster that ``RAY_ADDRESS`` names; else start a Ray that has ``cpus`` for its actors, and one more.

    A process that is connected already stays so.
    """
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level="error")
        return
    ray.init(
        address="local",  # not another one of this machine's
        num_cpus=max(os.cpu_count() or 1, math.ceil(cpus) + 1),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level="error",
    )


def last_line(error: Exception) -> str:
    """What went wrong in another process: Ray's messages end with it, behind that process's trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
