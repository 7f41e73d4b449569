"""Section 2: bits. Warm against cold, and one job against the same job beside others.

Run by :mod:`benchmarks.exact.gpu_day`. Invariant: only ``numerics="bitwise"``, and a deterministic runner, can fail
here; ``fast`` promises no bits, so what it does is told and has no bar.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.common.report import Progress
from benchmarks.gpu.answers import run_jobs
from benchmarks.gpu.day import Day, Findings
from benchmarks.internals import BatchRunner, same_bits, step_grid
from kvboost.engine import KVBoost
from kvboost.errors import KVBoostError

_KNOWN = (1.0, 0.5, 0.73)  # shares of a prompt that a warm request knows


def warm_and_cold(day: Day, findings: Findings) -> None:
    """Requests that know a part of their prompt, each against the same on an empty cache."""
    for numerics in ("bitwise", "fast"):
        name = f"numerics={numerics!r}: warm equals cold"
        _with_engine(
            day, findings, numerics, name, lambda engine, to=name: _warm_against_cold(day, findings, engine, to)
        )


def _with_engine(day: Day, findings: Findings, numerics: str, name: str, work: Callable[[KVBoost], None]) -> None:
    try:
        engine = day.engine(numerics=numerics)
    except KVBoostError as error:
        findings.not_run(name, f"this model or device refuses it: {error}")
        return
    with engine:
        work(engine)


def _warm_against_cold(day: Day, findings: Findings, engine: KVBoost, name: str) -> None:
    lengths = _lengths(day, engine)
    progress = Progress("requests", len(lengths) * len(_KNOWN))
    other, exact, unsaid, count = [], 0, 0, 0
    for place, length in enumerate(lengths):
        prompt = [*day.prompt(place, length), *day.question(place)]
        engine.clear()
        cold = engine.prefill(prompt)
        kept = cold.cache.extract(0, len(prompt))
        for share in _KNOWN:
            engine.clear()
            engine.prefill(prompt[: int(share * length)] + day.question(place + 1))
            warm = engine.prefill(prompt)
            count += 1
            exact += warm.reuse.exact_tokens
            unsaid += not warm.reuse.bitwise
            same = same_bits(warm.logits, cold.logits) and all(map(same_bits, warm.cache.extract(0, len(prompt)), kept))
            other += [] if same else [f"{length} tokens, {share:.0%} known"]
            progress.step()
    found = f"{count - len(other)} of {count} to the bit, {exact} tokens reused"
    found += f"; other bits: {', '.join(other)}" if other else ""
    if not exact:
        findings.not_run(name, "nothing was reused: this model's steps are longer than its prompts may be")
    elif engine.config.numerics == "bitwise":
        found += f"; {unsaid} not reported as bitwise" if unsaid else ""
        findings.check(name, not other and not unsaid, found=found, expected="the same bits, logits and KV")
    else:
        findings.note(name, found)


def _lengths(day: Day, engine: KVBoost) -> list[int]:
    """On a grid a prompt resumes at whole steps, so it must have two of them for something to be reused."""
    grid = step_grid(engine) or 1
    lengths = {max(length, 2 * grid + 57) for length in (day.sizes.lengths[0], day.sizes.usual)}
    room = day.sizes.positions
    return sorted(lengths if room is None else {min(length, room) for length in lengths})


def companions(day: Day, findings: Findings) -> None:
    """The same job alone and beside others: its tokens and the bits of their log-probabilities."""
    for numerics, deterministic in (("bitwise", True), ("bitwise", False), ("fast", False)):
        name = f"numerics={numerics!r}, {'deterministic' if deterministic else 'joint'} runner: whoever else runs"
        _with_engine(
            day,
            findings,
            numerics,
            name,
            lambda engine, to=name, alike=deterministic: _beside_others(day, findings, engine, to, alike),
        )


def _beside_others(day: Day, findings: Findings, engine: KVBoost, name: str, deterministic: bool) -> None:
    length = day.sizes.lengths[0]
    job = day.prompt(0, length)
    crowds = [[day.prompt(1, length)], [day.prompt(number, max(24, length // number)) for number in (2, 3, 4)]]
    try:
        runner = BatchRunner(engine, deterministic=deterministic)
    except KVBoostError as error:
        findings.not_run(name, str(error))
        return
    with runner:
        alone = run_jobs(runner, [job], new=day.sizes.new)[0]
        beside = []
        for crowd in crowds:
            engine.clear()
            beside.append(run_jobs(runner, [job, *crowd], new=day.sizes.new)[0])
    tokens = sum([token for token, _ in one] == [token for token, _ in alone] for one in beside)
    bits = sum(one == alone for one in beside)
    found = f"of {len(crowds)} crowds {bits} left the log-probabilities' bits, {tokens} the tokens"
    if deterministic:
        findings.check(name, bits == len(crowds), found=found, expected="the same bits")
    else:
        findings.note(name, found)


PARTS = {"warm against cold": warm_and_cold, "other companions": companions}
