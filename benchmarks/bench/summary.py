"""What samples say: ratios pair by pair with their spread, reuse by trust, quality, memory; as figures and as tables.

Used for the terminal's tables and the HTML report. Invariant: a ratio is taken of two requests with the same tokens
that were asked in the same turn (with three contestants, one may have run between them), and above one our engine was
faster.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.bench.contestants import OURS
from benchmarks.common.report import Report
from kvboost.bench import compare
from kvboost.bench.compare import REUSE, Sample
from kvboost.bench.report import Machine, Spread, Table

_STEPS = 4  # lengths that are told apart between one and its double


@dataclass
class Pairing(compare.Pairing):
    """One workload, one rival and one engine of ours, over all repeats, in processes of their own."""

    rival: str = ""
    memory: tuple[int, int] = (0, 0)
    """Peaks of the rival's process and of ours, in bytes."""
    running_peaks: set[str] = field(default_factory=set)
    """Whose peak could not be reset before the workload, so that it is the largest so far."""
    threads: tuple[int | None, int | None] = (None, None)
    """Of the rival's torch and of ours."""
    file_dtype: bool = False
    """Whether the rival runs in the dtypes of its own file, whatever ours runs in."""
    bitwise: bool | None = None
    """Whether a warm run had the bits of a cold one; None if it was not asked."""

    def reuse(self) -> list[float]:
        """Of each request the share that our engine did not compute."""
        return [one["cached"] / prompt for one, prompt in zip(self.ours, self.prompts, strict=True)]

    def mean_quality(self, name: str) -> float | None:
        """Mean ``kl`` or ``regret`` over the answers that used approximate KV; None if none did."""
        found = [one["quality"][name] for one in self.ours if one.get("quality")]
        return statistics.fmean(found) if found else None

    def flips(self) -> tuple[int, int]:
        """Tokens that approximate KV changed although plain Transformers was sure of them, and all of that kind."""
        found = [one["quality"] for one in self.ours if one.get("quality")]
        return sum(one["decisive_flips"] for one in found), sum(one["decisive"] for one in found)


def pairings(samples: Iterable[Sample]) -> list[Pairing]:
    """All pairings in a file's samples, in its order."""
    found: dict[tuple[str, str, str], Pairing] = {}
    for sample in samples:
        if "warm" not in sample:
            continue
        rival = sample["rival"]
        for engine in (name for name in sample["warm"] if name != rival):
            key = sample["workload"], rival, engine.removeprefix(f"{OURS} ")
            pairing = found.setdefault(key, Pairing(key[0], key[2], rival=rival))
            for number in (number for number, counts in enumerate(sample["counts"]) if counts):
                pairing.add(sample["prompts"][number], sample["warm"][rival][number], sample["warm"][engine][number])
            pairing.cold_theirs += sample["cold"][rival]
            pairing.cold_ours += sample["cold"][engine]
            peaks = sample["rss_peak"]
            pairing.memory = max(pairing.memory[0], peaks[rival]), max(pairing.memory[1], peaks[engine])
            pairing.running_peaks |= {name for name in (rival, engine) if not sample["rss_reset"][name]}
            pairing.threads = sample["threads"][rival], sample["threads"][engine]
            pairing.file_dtype = sample["dtypes"][rival] is None
            if sample["bitwise"] is not None and engine.endswith("exact"):
                pairing.bitwise = sample["bitwise"] and pairing.bitwise is not False
    return list(found.values())


def left_out(samples: Iterable[Sample]) -> dict[str, str]:
    """Rivals that are not in the samples, or not to the end, and why. One that took part later is not among them."""
    found: dict[str, str] = {}
    for sample in samples:
        if "skipped" in sample:
            found[sample["rival"]] = sample["skipped"]
        elif "warm" in sample:
            found.pop(sample["rival"], None)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """A value that this share of all does not exceed."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def break_even(pairing: Pairing) -> int | None:
    """The shortest prompt from which on our engine was faster at every length; None if it never was."""
    shortest = None
    for length, ratio in reversed(medians_by_length(zip(pairing.prompts, pairing.ratio(), strict=True))):
        if ratio <= 1.0:
            break
        shortest = round(length)
    return shortest


def medians_by_length(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Lengths and the medians of what was measured there, shortest first; lengths that are nearly equal are one."""
    groups: dict[int, list[tuple[float, float]]] = {}
    for length, value in points:
        groups.setdefault(round(_STEPS * math.log2(max(1, length))), []).append((length, value))
    return [
        (statistics.median(length for length, _ in group), statistics.median(value for _, value in group))
        for _, group in sorted(groups.items())
    ]


COLUMNS = ("workload", "against", "ours", "theirs ms", "ours ms", "faster", "CPU", "cold", *REUSE, "KL")


def row(pairing: Pairing) -> list[str]:
    """The cells of :data:`COLUMNS`."""
    workload, engine, theirs, ours, faster, *rest = compare.row(pairing)
    cpu = Spread.of(pairing.ratio("cpu_ms")).text()
    divergence = pairing.mean_quality("kl")
    found = f"{divergence:.4f}" if divergence is not None else "-"
    return [workload, pairing.rival, engine, theirs, ours, faster, cpu, *rest, found]


DETAILS = ("workload", "against", "ours", "p50 ms", "p95 ms", "total ms", "tokens/s", "memory MB", "regret", "flips")


def details(pairing: Pairing) -> list[str]:
    """The cells of :data:`DETAILS`, theirs and ours: percentiles of TTFT, whole answers, memory; and harm by ours."""
    cells: list[str] = []
    both = (pairing.theirs, pairing.ours)
    for share in (0.5, 0.95):
        cells.append(" / ".join(f"{percentile([one['ttft_ms'] for one in side], share):.0f}" for side in both))
    cells.append(" / ".join(f"{statistics.median(one['total_ms'] for one in side):.0f}" for side in both))
    cells.append(
        " / ".join(
            f"{sum(len(one['tokens']) for one in side) / max(1e-3, sum(one['total_ms'] for one in side) / 1000):.1f}"
            for side in both
        )
    )
    cells.append(" / ".join(f"{peak / 1e6:.0f}" for peak in pairing.memory))
    regret, (flips, sure) = pairing.mean_quality("regret"), pairing.flips()
    cells += ["-", "-"] if regret is None else [f"{regret:.4f}", f"{flips} of {sure}"]
    return [pairing.workload, pairing.rival, pairing.engine, *cells]


def notes(found: Sequence[Pairing], samples: Sequence[Sample]) -> list[str]:
    """What the table's columns are, the figures that are no column, and who is missing."""
    told = [
        "Times are milliseconds from the call to the first token, as medians. faster: theirs by ours, pair by pair, "
        "median [lowest highest]; CPU: the same in processor time; cold: whole calls for one token with empty caches, "
        "storing included; below one, ours took longer.",
        "exact and approx: prompt tokens that were not computed, by trust. same answer: greedy answers equal to the "
        "rival's. KL: from plain Transformers, of answers, asked once more without a clock, that used approximate KV; "
        "so are regret (nats that the other tokens cost) and flips (changed tokens of those that plain Transformers "
        "was sure of).",
    ]
    for pairing in found:
        if pairing.workload == "document" and pairing.engine == "exact":
            length = break_even(pairing)
            said = f"from {length} tokens on" if length is not None else "at no length measured"
            told.append(f"Against {pairing.rival}, a known document is faster {said}.")
    for rival, (theirs, own) in {pairing.rival: pairing.threads for pairing in found}.items():
        if theirs is not None and theirs != own:
            told.append(f"{rival} had {theirs} threads and ours {own}: compare CPU, or set OMP_NUM_THREADS.")
    for rival in dict.fromkeys(pairing.rival for pairing in found if pairing.file_dtype):
        told.append(f"{rival} ran in the dtypes of its own file, the others in ours: its times compare both at once.")
    running = sorted(set().union(*(pairing.running_peaks for pairing in found)))
    if running:
        told.append(
            f"memory of {', '.join(running)} is the peak so far, not of each workload: it cannot be reset there."
        )
    checked = [pairing for pairing in found if pairing.bitwise is not None]
    if checked:
        good = sum(bool(pairing.bitwise) for pairing in checked)
        told.append(f"A warm prefill has the bits of a cold one in {good} of {len(checked)} workloads.")
    return told + [f"Left out: {reason}" for reason in left_out(samples).values()]


def machine_of(header: Mapping[str, Any], samples: Sequence[Sample]) -> Machine:
    """Where the samples were taken, with the dtype that our engine ran in."""
    machine = Machine(**header["machine"])
    found = [dtype for one in samples for name, dtype in one.get("dtypes", {}).items() if name.startswith(f"{OURS} ")]
    return replace(machine, dtype=found[0]) if found else machine


def report_of(header: Mapping[str, Any], samples: Sequence[Sample]) -> Report:
    """The terminal's tables. It is ``failed`` if a warm run had other bits than a cold one."""
    found = pairings(samples)
    machine = machine_of(header, samples)
    report = Report("bench", failed=any(pairing.bitwise is False for pairing in found))
    tokens = header["settings"]["tokens"]
    title = f"Time to the first token, prompts of about {tokens} tokens" if tokens else "Time to the first token"
    table = Table(title, machine, COLUMNS, notes=notes(found, samples))
    more = Table("Theirs / ours: percentiles of the first token, whole answers, peak memory; harm", machine, DETAILS)
    for pairing in found:
        table.add(*row(pairing))
        more.add(*details(pairing))
    report.tables = [table, more]
    return report
