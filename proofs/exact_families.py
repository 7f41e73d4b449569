"""20,000 random requests over every family: warm against cold, to the bit, each with its predicted hit length.

usage: python proofs/exact_families.py [REQUESTS]

The state machine is the one of tests/engine/test_exact.py, with more examples and fresh random seeds.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.exactness import ExactReuseMachine
from tests.helpers.models import FAMILIES, tiny_model

from kvboost.bench.report import describe_machine


def main() -> None:
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    logging.getLogger("transformers").setLevel(logging.ERROR)
    cases = {family: (family, torch.float32, {}, 1) for family in FAMILIES}
    wide = {"hidden_size": 256, "intermediate_size": 512}
    cases["llama, wide"] = ("llama", torch.float32, wide, 4)
    cases["llama, wide, bfloat16"] = ("llama", torch.bfloat16, wide, 4)
    print(describe_machine().line)
    print("\n| model | requests | with a hit | bits apart | seconds |\n|---|---|---|---|---|", flush=True)
    total = hits = 0
    for name, (family, dtype, overrides, scale) in cases.items():
        start = time.perf_counter()
        share = (wanted + len(cases) - 1) // len(cases)
        fields = {"model": tiny_model(family, dtype=dtype, **overrides), "requests": 0, "hits": 0, "scale": scale}
        machine = type("Machine", (ExactReuseMachine,), fields)
        while machine.requests < share:  # a difference raises and ends the proof
            examples = settings(
                max_examples=20,
                stateful_step_count=30,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            run_state_machine_as_test(machine, settings=examples)
        total, hits = total + machine.requests, hits + machine.hits
        seconds = time.perf_counter() - start
        print(f"| {name} | {machine.requests} | {machine.hits} | 0 | {seconds:.0f} |", flush=True)
    print(f"| all | {total} | {hits} | 0 | |")


if __name__ == "__main__":
    main()
