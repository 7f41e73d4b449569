"""Break-even bandwidth: from which bandwidth on loading KV from a shared tier is faster than computing it, by model.

Nothing is measured: bytes of a token's KV follow from a model's shape, the seconds it takes to compute from its
parameters and the device's speed. Where a model runs, give what was measured there instead: ``--kv-bytes`` and
``--tokens-per-second``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.common.measure import positive
from benchmarks.common.report import Report

QUICK: dict[str, object] = {}


@dataclass(frozen=True)
class Shape:
    """What of a model counts here."""

    billions: float
    layers: int
    kv_heads: int
    head_dim: int

    def kv_bytes(self, element: int) -> int:
        """Of one token: keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element


_MODELS = {
    "SmolLM2-135M": Shape(0.135, 30, 3, 64),
    "Qwen2.5-Coder-1.5B": Shape(1.54, 28, 2, 128),
    "Qwen2.5-7B": Shape(7.6, 28, 4, 128),
    "Llama-3.1-8B": Shape(8.0, 32, 8, 128),
    "Llama-2-13B (no grouped heads)": Shape(13.0, 40, 40, 128),
    "Llama-3.1-70B": Shape(70.6, 80, 8, 128),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--tflops", type=float, default=400.0, help="that prefill reaches, all devices (default 400)")
    parser.add_argument("--element-bytes", type=positive, default=2, help="of stored KV (default 2)")
    parser.add_argument("--kv-bytes", type=positive, help="of a token, measured")
    parser.add_argument("--tokens-per-second", type=float, help="of prefill, measured")


def run(args: argparse.Namespace) -> Report:
    """One row for each model, and one for what was measured."""
    report = Report("break_even")
    table = report.table("Break-even bandwidth", ["model", "KV bytes per token", "tokens/s", "break-even GB/s"])
    rows = {
        name: (shape.kv_bytes(args.element_bytes), args.tflops * 1e12 / (2e9 * shape.billions))
        for name, shape in _MODELS.items()
    }
    if args.kv_bytes and args.tokens_per_second:
        rows = {"as given": (args.kv_bytes, args.tokens_per_second)}
    for name, (nbytes, speed) in rows.items():
        table.add(name, f"{nbytes:,}", f"{speed:,.0f}", f"{nbytes * speed / 1e9:.3g}")
        report.raw[name] = nbytes * speed
    table.notes.append(
        "Break-even bandwidth = KV bytes per token x prefill tokens per second. Below it a shared tier loses time; at "
        "twice it loading takes half as long as computing. Two operations per parameter and token; attention, which "
        "makes long prompts dearer to compute, is left out, so the true figure is lower."
    )
    return report
