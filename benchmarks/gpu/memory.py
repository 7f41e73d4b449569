"""Section 5: memory. The peak against the engine's own estimate, and whether a loop of requests grows.

Run by :mod:`benchmarks.exact.gpu_day`. Invariants: on an accelerator its allocator is asked, on the CPU the process's
resident set; the estimate is made before anything runs.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.process import memory_status
from benchmarks.common.report import Progress
from benchmarks.gpu.day import GREEDY, Day, Findings

_CACHED_PROMPTS = 3  # fit into the cache, so that it is full early
_PEAK_REQUESTS = 6
_GROWTH = {"cpu": 64 * 2**20}
_GROWTH_ELSEWHERE = 16 * 2**20
_SLACK = 1.10


class _Meter:
    """Bytes in use on all devices of the model, and their peak since the last reset."""

    def __init__(self, model: Any) -> None:
        self._devices = sorted({parameter.device for parameter in model.parameters()}, key=str)
        self.kind = self._devices[0].type

    @property
    def missing(self) -> str | None:
        """Why nothing can be measured; None if it can."""
        if self.kind == "cpu":
            return None if Path("/proc/self/clear_refs").exists() else "only Linux tells a process's peak"
        module = torch.get_device_module(self._devices[0])
        known = torch.accelerator.is_available() and hasattr(module, "max_memory_allocated")
        return None if known else f"{self.kind} does not tell its peak"

    def reset(self) -> None:
        if self.kind == "cpu":
            Path("/proc/self/clear_refs").write_text("5")
            return
        module = torch.get_device_module(self._devices[0])
        module.empty_cache()
        for device in self._devices:
            module.reset_peak_memory_stats(device)

    def peak(self) -> int:
        if self.kind == "cpu":
            return memory_status("VmHWM")
        module = torch.get_device_module(self._devices[0])
        return sum(int(module.max_memory_allocated(device)) for device in self._devices)

    def used(self) -> int:
        if self.kind == "cpu":
            return memory_status("VmRSS")
        module = torch.get_device_module(self._devices[0])
        return sum(int(module.memory_allocated(device)) for device in self._devices)


def _budget(day: Day, tokens: int) -> dict[str, int]:
    with day.engine() as engine:
        per_token = engine.parts.layout.bytes_per_token if engine.parts.layout is not None else 0
    size = _CACHED_PROMPTS * per_token * tokens
    return {"cache_bytes": size, "workspace_bytes": size}


def peak(day: Day, findings: Findings) -> None:
    """Requests until all caches are full; the peak of all of it."""
    meter = _Meter(day.model)
    if meter.missing is not None:
        findings.not_run("peak against the estimate", meter.missing)
        return
    length, new = day.sizes.lengths[-1], day.sizes.new
    with day.engine(**_budget(day, length)) as engine:
        estimate = engine.estimate_memory(context=length + new)
        meter.reset()
        progress = Progress("requests", _PEAK_REQUESTS)
        for number in range(_PEAK_REQUESTS):
            engine.generate(day.prompt(number, length), max_new_tokens=new, **GREEDY)
            progress.step()
        day.synchronize()
        found = meter.peak()
    findings.raw["peak"] = {"found": found, "estimate": estimate.peak, "lines": estimate.lines()}
    rows = [[name, f"{size / 1e6:,.0f}"] for name, size in estimate.lines().items()]
    findings.table(
        f"The estimate for {length + new} tokens, MB",
        ["what", "MB"],
        [*rows, ["estimated peak", f"{estimate.peak / 1e6:,.0f}"], ["measured peak", f"{found / 1e6:,.0f}"]],
        "Measured: the process's resident set."
        if meter.kind == "cpu"
        else "Measured: what torch's allocator gave out.",
    )
    findings.check(
        "peak against the estimate",
        found <= _SLACK * estimate.peak,
        found=f"{found / 1e6:,.0f} MB, {found / estimate.peak:.2f} of the estimate",
        expected=f"at most {_SLACK:.2f}",
    )


def growth(day: Day, findings: Findings) -> None:
    """New prompts through full caches: memory at the end against memory in the second quarter."""
    meter = _Meter(day.model)
    if meter.missing is not None:
        findings.not_run("growth over a loop of requests", meter.missing)
        return
    length, count = day.sizes.lengths[0], day.sizes.requests
    used: list[int] = []
    with day.engine(**_budget(day, length)) as engine:
        progress = Progress("requests", count)
        for number in range(count):
            engine.generate([*day.question(number), *day.prompt(number % 7, length)], max_new_tokens=4, **GREEDY)
            day.synchronize()
            used.append(meter.used())
            progress.step()
    quarter = max(1, count // 4)
    grown = statistics.median(used[-quarter:]) - statistics.median(used[quarter : 2 * quarter])
    most = _GROWTH.get(meter.kind, _GROWTH_ELSEWHERE)
    findings.raw["used"] = used
    findings.check(
        "growth over a loop of requests",
        grown <= most,
        found=f"{grown / 1e6:+.1f} MB over {count} requests",
        expected=f"at most {most / 1e6:.0f} MB",
    )


PARTS = {"peak": peak, "growth": growth}
