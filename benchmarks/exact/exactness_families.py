"""Exactness over all model families: thousands of random requests, warm against cold, to the bit.

The state machine is the one of tests/engine/test_exact.py, with more examples and fresh random seeds. A difference, or
a hit of another length than predicted, raises.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from benchmarks.common.measure import positive
from kvboost.bench.report import Progress, Report
from tests.helpers.exactness import ExactReuseMachine
from tests.helpers.models import FAMILIES, tiny_model

QUICK = {"requests": 50, "families": ["llama"]}
_WIDE = {"hidden_size": 256, "intermediate_size": 512}
_CASES: dict[str, tuple[str, torch.dtype, dict[str, Any], int]] = {
    **{family: (family, torch.float32, {}, 1) for family in FAMILIES},
    "llama, wide": ("llama", torch.float32, _WIDE, 4),
    "llama, wide, bfloat16": ("llama", torch.bfloat16, _WIDE, 4),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--requests", type=positive, default=20_000, help="over all families (default 20000)")
    parser.add_argument("--families", nargs="+", choices=list(_CASES), default=list(_CASES), help="default: all")


def run(args: argparse.Namespace) -> Report:
    """Every family in turn; the claim fails by an exception."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    report = Report("exactness_families")
    table = report.table("Exactness by family", ["model", "requests", "with a hit", "bits apart", "seconds"])
    share = -(-args.requests // len(args.families))
    progress = Progress("requests", args.requests)
    total = hits = 0
    for name in args.families:
        family, dtype, overrides, scale = _CASES[name]
        start = time.perf_counter()
        fields = {"model": tiny_model(family, dtype=dtype, **overrides), "requests": 0, "hits": 0, "scale": scale}
        machine: Any = type("Machine", (ExactReuseMachine,), fields)
        while machine.requests < share:
            before = machine.requests
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=20,
                    stateful_step_count=30,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
            progress.step(machine.requests - before)
        total, hits = total + machine.requests, hits + machine.hits
        table.add(name, machine.requests, machine.hits, 0, f"{time.perf_counter() - start:.0f}")
    table.add("all", total, hits, 0, "")
    return report
