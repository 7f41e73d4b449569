"""Section 3: what a prefill and a decode step ask of the device: launches, waits, copies, and which were not pinned.

Run by :mod:`benchmarks.exact.gpu_day`, counted by ``torch.profiler``; tests count on simulated devices instead.
Invariant: nothing here has a bar. The counts stand beside plain Transformers' of the same prompt, counted the same way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common.measure import first_token
from benchmarks.common.report import Progress
from benchmarks.gpu.day import GREEDY, Day, Findings
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode

KINDS = {
    "operators": r"^aten::",
    "launches": r"Launch\w*Kernel|KernelLaunch",
    "waits": r"(Stream|Device|Event)Synchronize|urQueueFinish|urEventWait",
    "copy calls": r"^(cuda|hip|cu)Memcpy|^urEnqueue\w*(Copy|MemBufferRead|MemBufferWrite)",
    "uploads": r"^Memcpy HtoD|^CopyHostToDevice",
    "downloads": r"^Memcpy DtoH|^CopyDeviceToHost",
    "not pinned": r"^Memcpy .*Pageable",
}
"""The names that ``torch.profiler`` gives (CUDA's, HIP's and Level Zero's), by what they mean."""

_FEW, _MORE = 2, 8  # tokens decoded; the difference is what a step asks for
_BATCHES = (1, 8)
_NAMES_KEPT = 40


def profiled(work: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """The counts of what this thread asks for, by ``torch.profiler``: by kind, and by the names it gives."""
    profiler = torch.profiler
    kinds = profiler.supported_activities()
    with profiler.profile(activities=kinds, acc_events=True) as found:
        work()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    return by_kind(Counter({entry.key: entry.count for entry in found.key_averages()}))


def by_kind(names: Counter[str]) -> tuple[Counter[str], Counter[str]]:
    """Names counted by what they mean, and the names themselves."""
    counts: Counter[str] = Counter()
    for name, count in names.items():
        for kind, pattern in KINDS.items():
            if re.search(pattern, name):
                counts[kind] += count
    return counts, names


def prefill(day: Day, findings: Findings) -> None:
    """One cold prefill and one warm one, and plain Transformers' first token of the same prompt."""
    prompt = day.prompt(0, day.sizes.usual)
    known = len(prompt) - len(day.question(0))
    with day.engine() as engine:
        first_token(engine, prompt, baseline=True)  # what happens once is not counted
        engine.prefill(prompt)
        found = {"plain": day.count(partial(first_token, engine, prompt, baseline=True))}
        engine.clear()
        found["cold"] = day.count(partial(engine.prefill, prompt))
        engine.clear()
        engine.prefill(prompt[:known])
        found["warm"] = day.count(partial(engine.prefill, prompt))
    _tell(findings, f"Prefill of {len(prompt)} tokens, {known} of them known in the warm one", found)
    _against(findings, "operators of a cold prefill against plain", found["cold"][0], found["plain"][0])


def decode(day: Day, findings: Findings) -> None:
    """One decode step of one sequence and of eight, and plain Transformers' of one."""
    found: dict[str, tuple[Counter[str], Counter[str]]] = {}
    with day.engine() as engine:
        prompts = [day.prompt(number, day.sizes.lengths[0]) for number in range(max(_BATCHES))]
        found["plain, 1"] = _step(day, partial(_generate, engine, prompts[0], mode=GenerationMode.BASELINE))
        progress = Progress("batches", len(_BATCHES))
        for batch in _BATCHES:
            if batch == 1:
                work: Callable[[int], Any] = partial(_generate, engine, prompts[0])
            else:
                work = partial(_generate_batch, engine, prompts[:batch])
            work(_FEW)
            found[f"ours, {batch}"] = _step(day, work)
            progress.step()
    steps = _MORE - _FEW
    _tell(
        findings,
        "One decode step, by sequences that decode together",
        found,
        f"The difference of {_MORE} and {_FEW} tokens, divided by {steps}.",
        steps=steps,
    )
    _against(findings, "operators of a decode step against plain", found["ours, 1"][0], found["plain, 1"][0])


def _generate(engine: KVBoost, prompt: list[int], new: int, **how: Any) -> None:
    engine.generate(prompt, max_new_tokens=new, **GREEDY, **how)


def _generate_batch(engine: KVBoost, prompts: list[list[int]], new: int) -> None:
    engine.generate_batch(prompts, max_new_tokens=new, **GREEDY)


def _step(day: Day, work: Callable[[int], Any]) -> tuple[Counter[str], Counter[str]]:
    """What the steps between few tokens and more of them take together."""
    few, more = day.count(partial(work, _FEW)), day.count(partial(work, _MORE))
    return tuple(Counter({name: b[name] - a[name] for name in b}) for a, b in zip(few, more, strict=True))  # type: ignore[return-value]


def _tell(
    findings: Findings, title: str, found: dict[str, tuple[Counter[str], Counter[str]]], *notes: str, steps: int = 1
) -> None:
    kinds = [kind for kind in KINDS if any(counts[kind] for counts, _ in found.values())]
    rows = [[name, *(f"{counts[kind] / steps:g}" for kind in kinds)] for name, (counts, _) in found.items()]
    none = [kind for kind in KINDS if kind not in kinds]
    told = [*notes, "Operators are counted with those that they call."]
    if set(kinds) <= {"operators"}:
        told.append("No launches, waits or copies are seen: on a CPU the profiler has operators only.")
    elif none:
        told.append(f"None at all: {', '.join(none)}.")
    findings.table(title, ["", *kinds], rows, *told)
    findings.raw[title] = {
        name: {"kinds": dict(counts), "names": dict(names.most_common(_NAMES_KEPT)), "steps": steps}
        for name, (counts, names) in found.items()
    }


def _against(findings: Findings, what: str, ours: Counter[str], plain: Counter[str]) -> None:
    kind = "launches" if plain["launches"] else "operators"
    if plain[kind]:
        findings.note(what.replace("operators", kind), f"{ours[kind] / plain[kind]:.2f} times as many")


PARTS = {"prefill": prefill, "decode steps": decode}
