"""A GPU day: right answers, bits, copies, speed and memory on your card, in one command, as a file and a page to send.

Five sections, each for itself. A finished one is kept in a JSON file with what it was run on, so a second start goes on
where the first one stopped; what failed or was killed in the middle is run again, last. Neither the file nor the page
names a folder, a host or a user, or holds text of a prompt. It also runs on a CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.common.measure import DTYPES, TextSource, add_engine_arguments, model_folder, positive
from benchmarks.common.report import BenchError, Report
from benchmarks.gpu import answers, bits, copies, memory, speed
from benchmarks.gpu.day import FAILED, PASSED, Day, Findings, Sizes
from benchmarks.gpu.page import html_page
from benchmarks.gpu.record import DONE, RAISED, DayFile, describe_setup, explain, failures, replace
from benchmarks.internals import ModelSource, max_positions_of
from kvboost.bench.report import say
from kvboost.engine import KVBoost
from kvboost.errors import ConfigError

QUICK = {"short": True, "lengths": [96], "rounds": 1, "new": 8}

Part = Callable[[Day, Findings], None]


@dataclass(frozen=True)
class Section:
    """One of the five."""

    title: str
    parts: Mapping[str, Part]


SECTIONS = {
    "answers": Section("1. Right answers", answers.PARTS),
    "bits": Section("2. Bits", bits.PARTS),
    "copies": Section("3. Launches, waits and copies", copies.PARTS),
    "speed": Section("4. Speed", speed.PARTS),
    "memory": Section("5. Memory", memory.PARTS),
}
_FULL = Sizes(lengths=(512, 2048, 8192), rounds=9, new=64, requests=200)
_SHORT = Sizes(lengths=(192, 512), rounds=3, new=8, requests=16)
_ROOM = 128  # positions for a question, a beginning and an answer
_LEAST = 64  # tokens of a prompt of which something can be reused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_engine_arguments(parser)
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="default: the checkpoint's")
    parser.add_argument("--short", action="store_true", help="minutes: short prompts, few rounds")
    parser.add_argument("--lengths", type=positive, nargs="+", help="tokens of prompts (default 512 2048 8192)")
    parser.add_argument("--rounds", type=positive, help="rounds of each time (default 9)")
    parser.add_argument("--new", type=positive, help="tokens to decode (default 64)")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all")
    parser.add_argument("--again", action="store_true", help="run them again, though they are done")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where the file and the page go (default: here; with --quick they are not kept)",
    )


def run(args: argparse.Namespace) -> Report:
    """Every section that is not done."""
    folder = model_folder(args)
    results = (args.results or Path()).expanduser()
    if not results.is_dir():
        raise BenchError(f"there is no folder {results}; create it first, or give another with --results")
    device = _device(args)
    setup = describe_setup(folder, device=device, dtype=args.dtype)
    sizes = _sizes(args)
    settings = {
        "numerics": args.numerics or "by the device",
        **{name: _plain(value) for name, value in vars(sizes).items()},
    }
    name = f"gpu_day-{setup['model'].replace('/', '-')}-{device.type}"
    day_file = DayFile(results / f"{name}.json", setup, settings)
    page = results / f"{name}.html"
    todo = order(day_file, args.section, again=args.again)
    for done in args.section:
        if done not in todo:
            say(f"{SECTIONS[done].title}: done already; --again runs it again")
    if todo:
        with _load(args, folder) as engine:
            run_sections(_day(engine, args, folder, sizes), day_file, todo, page)
    replace(page, html_page(day_file, titles()))
    return _report(day_file, args, page)


def titles() -> dict[str, str]:
    """The sections in their order."""
    return {name: section.title for name, section in SECTIONS.items()}


def order(day_file: DayFile, asked: list[str], *, again: bool) -> list[str]:
    """What is to be run: in order, but last what was begun and did not end, so that it cannot stand in the way."""
    todo = [name for name in SECTIONS if name in asked and (again or not day_file.is_done(name))]
    return sorted(todo, key=day_file.was_tried)


def run_sections(day: Day, day_file: DayFile, todo: list[str], page: Path) -> None:
    """Run these sections; keep each as soon as it ends, and the page with it."""
    for number, name in enumerate(todo, 1):
        section = SECTIONS[name]
        day_file.begin(name)
        say(f"{section.title} ({number} of {len(todo)} sections)")
        began, findings = time.perf_counter(), Findings()
        try:
            state = _run_parts(day, section, findings)
        except KeyboardInterrupt:
            raise BenchError(f"stopped in {section.title!r}; the same command runs it again and goes on") from None
        day_file.keep(name, findings.as_dict(), state=state, seconds=time.perf_counter() - began)
        replace(page, html_page(day_file, titles()))
        if (why := _dead(day)) is not None:
            say(f"the device does not answer any more ({why}); start the same command again for the other sections")
            return


def _run_parts(day: Day, section: Section, findings: Findings) -> str:
    """Run all parts. One that raises is a failure of the section, and the next one goes on."""
    state = DONE
    for number, (name, part) in enumerate(section.parts.items(), 1):
        say(f"  {name} ({number} of {len(section.parts)})")
        try:
            part(day, findings)
            day.synchronize()  # what went wrong on the device is this part's
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what was found
            findings.fail(name, explain(error))
            say(f"  {name}: {type(error).__name__}")
            state = RAISED
    return state


def _dead(day: Day) -> str | None:
    """Why the device computes no more, as after a failed assertion; None if it does."""
    try:
        torch.ones(2, device=day.device).sum()
        day.synchronize()
    except RuntimeError as error:
        return type(error).__name__
    return None


def _device(args: argparse.Namespace) -> torch.device:
    """Where the model goes. Raises BenchError for a device that is not there."""
    try:
        device = ModelSource(str(args.model), device=args.device).torch_device
    except ConfigError as error:
        raise BenchError(str(error)) from error
    if device.type == "cpu":
        print("on the CPU: this says nothing about a GPU", file=sys.stderr)
    return device


def _sizes(args: argparse.Namespace) -> Sizes:
    """What was asked for, cut to the model's positions."""
    base = _SHORT if args.short else _FULL
    new = args.new or base.new
    most = max_positions_of(AutoConfig.from_pretrained(args.model.expanduser()).get_text_config(decoder=True))
    room = None if most is None else most - new - _ROOM
    if room is not None and room < _LEAST:
        raise BenchError(f"this model has {most} positions, too few for {new} new tokens; lower --new")
    lengths = sorted({length if room is None else min(length, room) for length in args.lengths or base.lengths})
    if lengths[0] < _LEAST:
        raise BenchError(f"--lengths {lengths[0]} is too short to reuse anything; give {_LEAST} or more")
    return Sizes(tuple(lengths), args.rounds or base.rounds, new, base.requests, room)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _load(args: argparse.Namespace, folder: Path) -> KVBoost:
    say(f"loading {folder.name}")
    # Its own caches would take memory from the engines that are measured.
    return _loaded(args, folder, device=args.device, cache_bytes=0, workspace_bytes=0)


def _loaded(args: argparse.Namespace, folder: Path, **settings: Any) -> KVBoost:
    settings = {"quality": "exact", "numerics": args.numerics, "host_cache_bytes": 0, **settings}
    return KVBoost.from_pretrained(str(folder), dtype=args.dtype, **settings)


def _day(engine: KVBoost, args: argparse.Namespace, folder: Path, sizes: Sizes) -> Day:
    return Day(
        engine.model,
        engine.tokenizer,
        TextSource(engine.tokenizer),
        sizes,
        count=copies.profiled,
        reload=partial(_loaded, args, folder),
        options={"numerics": args.numerics},
    )


def _report(day_file: DayFile, args: argparse.Namespace, page: Path) -> Report:
    """The verdicts in short; the files in its last lines."""
    report = Report("gpu_day")
    table = report.table("GPU day", ["section", "verdict", "failed"], dtype=args.dtype, model=args.model)
    for name in args.section:
        section = day_file.sections.get(name, {"state": "not run"})
        wrong = failures(section)
        report.failed |= bool(wrong) or section["state"] != DONE
        verdict = FAILED if wrong else PASSED if section["state"] == DONE else section["state"]
        table.add(SECTIONS[name].title, verdict, "; ".join(check["what"] for check in wrong) or "-")
    report.raw = {"sections": day_file.sections}
    table.notes += ["Neither file names a folder, a host or a user. To be sent to us:", f"JSON: {day_file.file}"]
    table.notes.append(f"page: {page}")
    return report
