"""Section 1: are the answers right? Cold, warm, through every tier, moved, side by side, in fewer bits, on two devices.

Run by :mod:`benchmarks.exact.gpu_day`. Invariants: the right answer is plain Transformers', or what the same engine
computed before it stored anything; KV that comes back from 16 bits must have the bits that were stored.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from benchmarks.common.measure import joined
from benchmarks.common.report import Progress
from benchmarks.gpu.day import GREEDY, Day, Findings, on_host, relative
from benchmarks.internals import (
    BatchRunner,
    Finished,
    Job,
    KVCodec,
    KVLayout,
    NewToken,
    codec_for,
    same_bits,
    why_no_approx,
    without_deadlines,
)
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode, PrefillResult

_PROMPTS = 3
_CODEC_ERROR = {8: 0.1, 4: 0.5}  # relative, root mean square: more is no rounding in any model
_MORE_THAN_CPU = 1.2
_DISK_BYTES = "20GB"


def warm_and_cold(day: Day, findings: Findings) -> None:
    """Logits and greedy tokens of the same prompts: plain Transformers, an empty cache, a full one."""
    rows, wrong, progress = [], [], Progress("prompts", _PROMPTS)
    with day.engine() as engine:
        for number in range(_PROMPTS):
            prompt = day.prompt(number, day.sizes.shorter(number))
            plain_logits = day.plain_logits(prompt)
            cold = engine.prefill(prompt)
            warm = engine.prefill(prompt)
            off_cold, off_warm = relative(cold.logits, plain_logits), relative(warm.logits, cold.logits)
            reused = warm.reuse.exact_tokens
            answers = _answers(engine, prompt, day.sizes.new)
            plain = answers.pop("plain")
            different = {name: day.other_answer(prompt, tokens, plain) for name, tokens in answers.items()}
            wrong += [f"prompt {number}, {name}: {why}" for name, why in different.items() if why]
            wrong += [] if off_cold <= day.tolerance else [f"prompt {number}: cold logits off by {off_cold:.1e}"]
            wrong += [] if off_warm <= day.tolerance else [f"prompt {number}: warm logits off by {off_warm:.1e}"]
            wrong += [] if reused else [f"prompt {number}: nothing was reused ({warm.reuse.reason})"]
            same = sum(tokens == plain for tokens in answers.values())
            rows.append(
                [number, len(prompt), reused, f"{off_cold:.1e}", f"{off_warm:.1e}", f"{same} of {len(answers)}"]
            )
            progress.step()
    columns = ["prompt", "tokens", "reused", "cold against plain", "warm against cold", "same greedy tokens as plain"]
    findings.table(
        "Logits: largest difference, relative to the largest logit",
        columns,
        rows,
        f"Bar: {day.tolerance:.0e} ({day.dtype}). A greedy token may differ where plain's own two are that close.",
    )
    findings.check(
        "warm, cold and plain Transformers answer alike",
        not wrong,
        found="; ".join(wrong) or f"{_PROMPTS} prompts, {day.sizes.new} tokens each",
        expected="the same up to rounding",
    )


def _answers(engine: KVBoost, prompt: list[int], new: int) -> dict[str, tuple[int, ...]]:
    """Greedy tokens: with the prompt stored, on an empty cache, and of plain Transformers."""
    options: dict[str, Any] = {"max_new_tokens": new, **GREEDY}
    warm = engine.generate(prompt, **options).token_ids
    engine.clear()
    cold = engine.generate(prompt, **options).token_ids
    plain = engine.generate(prompt, mode=GenerationMode.BASELINE, **options).token_ids
    return {"warm": warm, "cold": cold, "plain": plain}


def tiers(day: Day, findings: Findings) -> None:
    """Prompts that come back from memory, from the host tier and from the disk."""
    prompts = [day.prompt(number, day.sizes.shorter(number)) for number in range(_PROMPTS)]
    with day.engine(workspace_bytes=0) as engine:
        first = _prefills(engine, prompts)
        _compare(day, findings, "memory", first, _prefills(engine, prompts))
        per_token = engine.parts.layout.bytes_per_token if engine.parts.layout is not None else 0
    if (why := day.why_no_host_tier) is not None:
        findings.not_run("KV from the host tier", why)
    else:
        # Memory for about one and a half of the prompts, and a quarter of it may wait for the tier.
        small = {"cache_bytes": 2 * per_token * day.sizes.usual, "host_cache_bytes": 8 * per_token * day.sizes.usual}
        with day.engine(workspace_bytes=0, **small) as engine:
            without_deadlines(engine)
            first = _prefills(engine, prompts)
            engine.flush()
            _compare(day, findings, "host", first, _prefills(engine, prompts))
    with tempfile.TemporaryDirectory(prefix="kvboost-gpu-day-") as folder:
        disk: dict[str, Any] = {"disk_cache_dir": folder, "disk_cache_bytes": _DISK_BYTES, "workspace_bytes": 0}
        with day.engine(**disk) as engine:
            first = _prefills(engine, prompts)
            engine.flush()
        with day.engine(**disk) as engine:
            without_deadlines(engine)
            _compare(day, findings, "disk", first, _prefills(engine, prompts))


def _prefills(engine: KVBoost, prompts: Sequence[list[int]]) -> list[PrefillResult]:
    results, progress = [], Progress("prefills", len(prompts))
    for prompt in prompts:
        results.append(engine.prefill(prompt))
        progress.step()
    return results


def _compare(
    day: Day, findings: Findings, tier: str, first: Sequence[PrefillResult], again: Sequence[PrefillResult]
) -> None:
    """Logits up to rounding; the KV that was reused to the bit."""
    wrong, reused, worst = [], 0, 0.0
    for number, (before, after) in enumerate(zip(first, again, strict=True)):
        exact = after.reuse.exact_tokens
        from_tier = after.reuse.tiers.get(tier, 0)
        reused += from_tier
        off = relative(after.logits, before.logits)
        worst = max(worst, off)
        wrong += [] if off <= day.tolerance else [f"prompt {number}: logits off by {off:.1e}"]
        parts = (result.cache.extract(0, exact) for result in (before, after))
        if exact and not all(map(same_bits, *parts)):
            wrong.append(f"prompt {number}: other KV than was stored")
    wrong += [] if reused else [f"nothing came from it (reused from {_sources(again)})"]
    findings.check(
        f"KV from the {tier} tier" if tier != "memory" else "KV from memory",
        not wrong,
        found="; ".join(wrong) or f"{reused} tokens of {len(first)} prompts, logits within {worst:.1e}",
        expected="the bits that were stored",
    )


def _sources(results: Sequence[PrefillResult]) -> str:
    return ", ".join(sorted({tier for result in results for tier in result.reuse.tiers})) or "nowhere"


def non_prefix(day: Day, findings: Findings) -> None:
    """What the engine's own probe says of moving KV on this device; a moved text, all of it recomputed."""
    with day.engine(quality="fast") as engine:
        reason = why_no_approx(engine)
    if reason is not None:
        findings.not_run("non-prefix reuse", f"the engine's probe refused it: {reason}")
        return
    findings.note("non-prefix reuse", "the engine's probe allows it: moved keys equal fresh ones on this device")
    text, heads = day.prompt(0, day.sizes.usual), [day.prompt(1, 40), day.prompt(2, 56)]
    before, _ = joined([heads[0], text])
    tokens, ends = joined([heads[1], text, day.question(1)])
    everything: dict[str, Any] = {"quality": "fast", "force_approx": True, "recompute_ratio": 1.0}
    with day.engine(**everything) as engine, day.engine() as cold:
        engine.prefill(before, boundaries=[len(heads[0])])
        found = engine.prefill(tokens, boundaries=ends[:-1])
        off = relative(found.logits, cold.prefill(tokens, boundaries=ends[:-1]).logits)
    moved = found.reuse.moved_tokens
    findings.check(
        "moved text, all of it recomputed, against a cold prefill",
        moved > 0 and off <= day.tolerance,
        found=f"logits off by {off:.1e}, {moved} tokens moved" + (f" ({found.reuse.reason})" if not moved else ""),
        expected=f"at most {day.tolerance:.0e}, some moved",
    )


def jobs(day: Day, findings: Findings) -> None:
    """Several jobs in one runner against each alone."""
    prompts = [day.prompt(number, day.sizes.shorter(number)) for number in range(_PROMPTS)]
    with day.engine() as engine:
        alone, progress = [], Progress("jobs alone", len(prompts))
        for prompt in prompts:
            alone.append(engine.generate(prompt, max_new_tokens=day.sizes.new, **GREEDY).token_ids)
            progress.step()
        engine.clear()
        with BatchRunner(engine, max_running=len(prompts)) as runner:
            reason = runner.single_decode_reason
            together = run_jobs(runner, prompts, new=day.sizes.new)
    wrong = []
    for number, (prompt, own) in enumerate(zip(prompts, alone, strict=True)):
        why = day.other_answer(prompt, [token for token, _ in together[number]], own)
        wrong += [f"job {number}: {why}"] if why else []
    findings.check(
        f"{len(prompts)} jobs side by side against each alone",
        not wrong,
        found="; ".join(wrong) or f"{day.sizes.new} tokens each, the same",
        expected="the same up to rounding",
    )
    findings.note("decoding of several jobs", f"one by one: {reason}" if reason else "together, in one forward")


def run_jobs(runner: BatchRunner, prompts: Sequence[list[int]], *, new: int) -> list[list[tuple[int, float | None]]]:
    """Greedy tokens and log-probabilities of jobs that run together. Raises RuntimeError if one ends in error."""
    jobs = [Job(token_ids=tuple(prompt), max_new_tokens=new, top_logprobs=0) for prompt in prompts]
    answers = []
    for ticket in [runner.submit(job) for job in jobs]:
        events = list(ticket.events())
        end = events[-1]
        if isinstance(end, Finished) and end.error:
            raise RuntimeError(f"a job ended in error: {end.error}")
        answers.append([(event.token_id, event.logprob) for event in events if isinstance(event, NewToken)])
    return answers


def codec(day: Day, findings: Findings) -> None:
    """KV in 8 and 4 bits: what unpacks here, and whether the CPU unpacks the same KV as well."""
    prompt = day.prompt(0, min(day.sizes.usual, 512))
    with day.engine() as engine:
        layout = engine.parts.layout
        assert layout is not None
        block = engine.prefill(prompt).cache.extract(0, len(prompt))
    cpu = KVLayout(tuple(replace(spec, device=torch.device("cpu")) for spec in layout.slots))
    rows = []
    for bits, most in _CODEC_ERROR.items():
        here = max(_trip_errors(codec_for(bits, layout), block))
        there = max(_trip_errors(codec_for(bits, cpu), [tensor.to("cpu") for tensor in block]))
        rows.append([f"{bits} bits", f"{here:.2e}", f"{there:.2e}"])
        findings.check(
            f"KV in {bits} bits unpacks to what was packed",
            here <= min(most, _MORE_THAN_CPU * there),
            found=f"off by {here:.1e}, on the CPU by {there:.1e}",
            expected=f"at most {_MORE_THAN_CPU} of the CPU's, and {most:.0e}",
        )
    findings.table("Packed KV: error relative to the KV, root mean square", ["stored as", "here", "on the CPU"], rows)


def _trip_errors(coder: KVCodec, block: Sequence[torch.Tensor]) -> list[float]:
    back = coder.unpack(coder.pack(block, start=0))
    return [_mean_error(found, right) for found, right in zip(back, block, strict=True)]


def _mean_error(found: torch.Tensor, right: torch.Tensor) -> float:
    found, right = on_host(found), on_host(right)
    return float((found - right).square().mean().sqrt() / right.square().mean().sqrt())


def two_devices(day: Day, findings: Findings) -> None:
    """The model over all devices by ``device_map="auto"``, against the same on one."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if count < 2 or day.reload is None:
        findings.not_run("two devices", f"there are {count} accelerators")
        return
    prompt = day.prompt(0, day.sizes.usual)
    with ExitStack() as stack:
        spread = stack.enter_context(day.reload(device=None, device_map="auto", workspace_bytes=0))
        devices = {str(parameter.device) for parameter in spread.model.parameters()}
        cold, warm = spread.prefill(prompt), spread.prefill(prompt)
        moved = spread.prefill([*day.question(2), *prompt])
        right = day.plain_logits(prompt)
        off_cold, off_warm = relative(cold.logits, right), relative(warm.logits, cold.logits)
    findings.note("devices of device_map='auto'", ", ".join(sorted(devices)))
    findings.check(
        "a model over two devices",
        len(devices) > 1 and max(off_cold, off_warm) <= day.tolerance and warm.reuse.exact_tokens > 0,
        found=f"{len(devices)} devices; cold against plain on one {off_cold:.1e}, warm against cold {off_warm:.1e}, "
        f"{warm.reuse.exact_tokens} tokens reused; behind other text {moved.reuse.exact_tokens}",
        expected=f"at most {day.tolerance:.0e}, some reused",
    )


PARTS = {
    "warm, cold and plain": warm_and_cold,
    "memory, host tier, disk": tiers,
    "non-prefix reuse": non_prefix,
    "jobs side by side": jobs,
    "8 and 4 bits": codec,
    "two devices": two_devices,
}
