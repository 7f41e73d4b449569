"""Start: an engine in a new process, the first time and again, against loading its model with Transformers alone.

Three kinds of processes take turns: one that loads model and tokenizer with Transformers, one with an engine whose
cache directory is empty, and one with an engine that finds what an earlier start kept. Each times itself from its first
import to the loaded model; a process's CPU time is given too, as it says more where others compute. Invariant: the
second start keeps nothing that the first had not kept, else it is not one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common.measure import DTYPES, model_folder, positive
from benchmarks.common.report import BenchError, Progress, Report
from kvboost.bench.report import Spread, Table, describe_machine

QUICK = {"repeat": 1, "dtype": ["float32"]}
_BAR = 0.5  # s more than loading the model
_PLAIN, _FIRST, _SECOND = "model alone", "first start", "second start"
_PLAIN_LOAD = """
from transformers import AutoModelForCausalLM, AutoTokenizer
kept = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)
"""
_ENGINE = """
from kvboost import KVBoost
kept = KVBoost.from_pretrained(folder, dtype=dtype, device="cpu")
"""
_PROCESS = """
import json, sys, time
began, (_, folder, dtype) = time.perf_counter(), sys.argv
{load}
print(json.dumps([time.perf_counter() - began, time.process_time()]), flush=True)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, help="folder of a causal language model (config.json and weights)")
    parser.add_argument(
        "--dtype", choices=DTYPES, nargs="+", default=["float32", "bfloat16"], help="default: float32 bfloat16"
    )
    parser.add_argument("--repeat", type=positive, default=7, help="processes of each kind (default 7)")


def run(args: argparse.Namespace) -> Report:
    """Measure every dtype."""
    folder = model_folder(args)
    report = Report("start")
    for dtype in args.dtype:
        samples: dict[str, list[tuple[float, float]]] = {_PLAIN: [], _FIRST: [], _SECOND: []}
        progress = Progress(f"starts, {dtype}", total=3 * (args.repeat + 1))
        for turn in range(args.repeat + 1):
            with tempfile.TemporaryDirectory(prefix="kvboost-start-") as home:
                for name, load in ((_PLAIN, _PLAIN_LOAD), (_FIRST, _ENGINE), (_SECOND, _ENGINE)):
                    before = _files(home)
                    found = _start(load, folder, dtype, home)
                    if name == _SECOND and _files(home) != before:
                        raise BenchError("a second start kept something: the first had not kept all")
                    if turn:  # the first one brings files into memory
                        samples[name].append(found)
                    progress.step()
        report.raw[dtype] = samples
        report.tables.append(_table(samples, dtype, folder))
        report.failed |= _more(samples, _SECOND).median > _BAR
    return report


def _files(home: str) -> set[tuple[str, int]]:
    return {(str(file), file.stat().st_mtime_ns) for file in Path(home).rglob("*") if file.is_file()}


def _start(load: str, model: Path, dtype: str, home: str) -> tuple[float, float]:
    """Seconds, and seconds of CPU, of a process that starts so."""
    command = [sys.executable, "-c", _PROCESS.format(load=load), str(model), dtype]
    environment = {**os.environ, "KVBOOST_CACHE_HOME": home}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise BenchError((ran.stderr.strip().splitlines() or ["a process failed"])[-1])
    wall, cpu = json.loads(ran.stdout.splitlines()[-1])
    return wall, cpu


def _more(samples: dict[str, list[tuple[float, float]]], name: str, *, cpu: bool = False) -> Spread:
    """What such a start takes beyond loading the model, turn by turn."""
    return Spread.of([one[cpu] - plain[cpu] for one, plain in zip(samples[name], samples[_PLAIN], strict=True)])


def _table(samples: dict[str, list[tuple[float, float]]], dtype: str, model: Path) -> Table:
    columns = ["", "s", "CPU s", "more than the model alone, s", "the same in CPU s"]
    table = Table("Start of a process", describe_machine(dtype=dtype, model=str(model)), columns)
    for name, found in samples.items():
        both = [Spread.of([one[kind] for one in found]).text() for kind in (0, 1)]
        more = ["", ""] if name == _PLAIN else [_more(samples, name, cpu=cpu).text() for cpu in (False, True)]
        table.add(name, *both, *more)
    table.notes.append(
        "Median [lowest highest], from a process's first import to the loaded model and tokenizer; differences turn by "
        f"turn. The first start hashes the weights and measures the kernels. Bar for the second: {_BAR} s."
    )
    return table
