"""Exactness over all model families: thousands of random requests, warm against cold, to the bit.

The state machine is the one of tests/engine/test_exact.py, with more examples and seeds of their own. A difference, or
a hit of another length than predicted, raises. Trained models take part if they are given, with random tokens.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from benchmarks.common.measure import load_engine, positive
from benchmarks.common.parts import add_part_arguments, run_parts, total
from benchmarks.common.report import Report
from tests.helpers.exactness import ExactReuseMachine
from tests.helpers.models import FAMILIES, HYBRIDS, tiny_model

QUICK = {"requests": 50, "families": ["llama"]}
_PART, _TRAINED_PART = 250, 60  # requests; one of a trained model takes a second and more
_PER_EXAMPLE = 12  # about so many requests does one example of the state machine make
_WIDE = {"hidden_size": 256, "intermediate_size": 512}
_ON_GRID = ("gemma2",)  # resumed at multiples of 128 tokens: shorter prompts reuse nothing
_CASES: dict[str, tuple[str, torch.dtype, dict[str, Any], int]] = {
    **{family: (family, torch.float32, {}, 6 if family in _ON_GRID else 1) for family in FAMILIES},
    **{family: (family, torch.float32, {}, 6) for family in HYBRIDS},
    "llama, wide": ("llama", torch.float32, _WIDE, 4),
    "llama, wide, bfloat16": ("llama", torch.bfloat16, _WIDE, 4),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--requests", type=positive, default=20_000, help="over all models (default 20000)")
    parser.add_argument("--families", nargs="+", choices=list(_CASES), default=list(_CASES), help="default: all")
    # Not None: the short form would put a stand-in there.
    parser.add_argument("--model", type=Path, nargs="+", default=[], metavar="FOLDER", help="trained models instead")
    add_part_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Every model in turn; the claim fails by an exception, or by one in a part of an earlier run."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    machines = _trained(args.model) if args.model else {name: _tiny(name) for name in args.families}

    def ask(name: str, count: int, rng: random.Random) -> dict[str, int]:
        """One run of the state machine."""
        machine = type("Machine", (ExactReuseMachine,), {**machines[name], "requests": 0, "hits": 0})
        several = settings(
            max_examples=max(5, -(-count // _PER_EXAMPLE)),  # the first one does next to nothing
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(seed(rng.getrandbits(64))(machine), settings=several)
        return {"requests": machine.requests, "hits": machine.hits}

    wanted = dict.fromkeys(machines, -(-args.requests // len(machines)))
    size = _TRAINED_PART if args.model else _PART
    parts = run_parts(args, "exactness_families", "requests", wanted, size, ask)
    differ = [part for part in parts if "error" in part]
    report = Report("exactness_families", failed=bool(differ), raw={"parts": parts})
    table = report.table("Exactness by family", ["model", "requests", "with a hit", "differ", "seconds"])
    names = list(dict.fromkeys(part["kind"] for part in parts))
    for name in names:
        requests, hits = (total(parts, name, count) for count in ("requests", "hits"))
        found = sum(part["kind"] == name for part in differ)
        table.add(name, f"{requests:,}", f"{hits:,}", found, round(total(parts, name, "seconds")))
        report.failed |= hits == 0  # proves nothing
    requests, hits = (sum(total(parts, name, count) for name in names) for count in ("requests", "hits"))
    table.add("all", f"{requests:,}", f"{hits:,}", len(differ), "")
    return report


def _tiny(name: str) -> dict[str, Any]:
    """What a family's state machine has."""
    family, dtype, overrides, scale = _CASES[name]
    return {"model": tiny_model(family, dtype=dtype, **overrides), "scale": scale}


def _trained(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The state machines of trained models, each in two dtypes."""
    machines = {}
    for folder in folders:
        for dtype in ("float32", "bfloat16"):
            model = load_engine(argparse.Namespace(model=folder, device="cpu", numerics=None), dtype=dtype).model
            name = f"{folder.expanduser().resolve().name}, {dtype}"
            machines[name] = {"model": model, "vocab": model.config.vocab_size, "scale": 2}
    return machines
