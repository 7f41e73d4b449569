"""Section 4: speed. First tokens cold and warm against plain Transformers, decoding, loading from slower tiers.

Run by :mod:`benchmarks.exact.gpu_day`. Invariants: contestants alternate in one run; a time ends when the device is
done; a warm sample that reused too little is an error and no time.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

from benchmarks.common.measure import alternate, first_token, wall_ms
from benchmarks.common.report import BenchError
from benchmarks.gpu.day import Day, Findings
from benchmarks.internals import without_deadlines
from benchmarks.serve.batched_decoding import PaddedBatch, batched, single
from kvboost.bench.report import Spread, ratios
from kvboost.engine import KVBoost
from kvboost.types import GenerationResult

_LEAST_REUSED = 0.9  # of what is known
_LEAST_FROM_TIER = 0.5  # of the text: some of it may still be in memory
_TEXTS = 8  # that are asked for in turn, so that some are in the host tier
_BATCHES = (1, 8)
_DISK_BYTES = "20GB"


def first_tokens(day: Day, findings: Findings) -> None:
    """Prompts of several lengths and a new question behind each, every round."""
    rows = []
    for length in day.sizes.lengths:
        samples, first = _first_tokens_of(day, length)
        findings.raw[f"first token, {length}"] = {"call_ms": samples, "first_token_ms": dict(first)}
        rows.append(
            [
                f"{length:,}",
                *(Spread.of(samples[name]).text(1) for name in ("plain", "cold", "warm")),
                Spread.of(ratios(samples["cold"], samples["plain"])).text(),
                Spread.of(ratios(samples["plain"], samples["warm"])).text(),
                *(Spread.of(first[name]).text(1) for name in ("plain", "cold", "warm")),
            ]
        )
    columns = ["tokens", "plain, ms", "cold, ms", "warm, ms", "cold / plain", "plain / warm"]
    findings.table(
        "A question behind a text: whole call for one token",
        [*columns, "first token: plain", "cold", "warm"],
        rows,
        f"Median [lowest highest] of {day.sizes.rounds} rounds; ratios pair by pair. The call ends when the device is "
        "done, so storing counts; the first token is when Python has it. Warm: the text is known, the question new.",
    )


def _first_tokens_of(day: Day, length: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    text = day.prompt(0, length)
    first: dict[str, list[float]] = defaultdict(list)
    with day.engine() as cold, day.engine() as warm:
        warm.warm(text, boundaries=[length])

        def timed(name: str, ask: Callable[[list[int]], GenerationResult], numbers: Any) -> float:
            if name == "cold":
                cold.clear()
            prompt, results = [*text, *day.question(next(numbers))], []
            day.synchronize()
            took = wall_ms(lambda: results.append(ask(prompt)))
            if name == "warm":
                _check_reuse(results[0].cached_tokens, length)
            first[name].append(results[0].ttft_ms)
            return took

        boundaries = [length]
        asks: dict[str, Callable[[list[int]], GenerationResult]] = {
            "plain": lambda prompt: first_token(cold, prompt, baseline=True),
            "cold": lambda prompt: first_token(cold, prompt, boundaries=boundaries),
            "warm": lambda prompt: first_token(warm, prompt, boundaries=boundaries),
        }
        contestants = {name: partial(timed, name, ask, count()) for name, ask in asks.items()}
        samples = alternate(contestants, repeat=day.sizes.rounds, warmups=1, label=f"{length} tokens")
    return samples, {name: values[1:] for name, values in first.items()}  # without the warm-up


def _check_reuse(cached: int, known: int) -> None:
    if cached < _LEAST_REUSED * known:
        raise BenchError(f"only {cached} of {known} known tokens were reused; give the cache more memory")


def decoding(day: Day, findings: Findings) -> None:
    """Tokens per second behind prompts that are in place: ours stored, theirs in a cache that was filled before."""
    rows, new = [], day.sizes.new
    with day.engine() as engine:
        prompts = [day.prompt(number, day.sizes.lengths[0]) for number in range(max(_BATCHES))]
        for prompt in prompts:
            engine.warm(prompt)
        for batch in _BATCHES:
            padded, chosen = PaddedBatch(engine.model, prompts[:batch]), prompts[:batch]

            def ours(chosen: list[list[int]] = chosen) -> float:
                call = batched(engine, chosen, new) if len(chosen) > 1 else single(engine, chosen[0], new)
                return call[1]

            contestants = {"plain": lambda padded=padded: padded.generate(new)[1], "ours": ours}
            samples = alternate(contestants, repeat=day.sizes.rounds, warmups=1, label=f"decoding {batch}")
            findings.raw[f"decoding {batch}"] = samples
            cells = [Spread.of(samples[name]).text(1) for name in ("plain", "ours")]
            rows.append([batch, *cells, Spread.of(ratios(samples["ours"], samples["plain"])).text()])
    findings.table(
        f"Decoding {new} tokens behind {day.sizes.lengths[0]} known ones: tokens/s of the whole call",
        ["sequences", "plain", "ours", "ours / plain"],
        rows,
        "Plain decodes one padded batch of equal prompts, without a mask; eight of ours run in a BatchRunner.",
    )


def loading(day: Day, findings: Findings) -> None:
    """First tokens with the text in memory, in the host tier and on the disk."""
    length = day.sizes.usual
    with tempfile.TemporaryDirectory(prefix="kvboost-gpu-day-") as folder, day.engine(workspace_bytes=0) as engine:
        text = day.prompt(0, length)
        engine.warm(text)
        contestants: dict[str, Callable[[], float]] = {
            "computed by plain": partial(_timed, engine, text, baseline=True),
            "memory": partial(_timed, engine, text),
            "disk": _from_disk(day, text, Path(folder)),
        }
        with ExitStack() as stack:
            if (why := day.why_no_host_tier) is not None:
                findings.not_run("loading from the host tier", why)
            else:
                per_token = engine.parts.layout.bytes_per_token if engine.parts.layout is not None else 0
                # Memory for some of the texts that are asked for in turn; which of them is up to its policy.
                sizes = {
                    "cache_bytes": _TEXTS // 2 * per_token * length,
                    "host_cache_bytes": 3 * _TEXTS * per_token * length,
                }
                small = stack.enter_context(day.engine(workspace_bytes=0, **sizes))
                without_deadlines(small)
                contestants["host"] = _from_host(day, small, length)
            samples = alternate(contestants, repeat=day.sizes.rounds, warmups=1, label="loading")
    findings.raw["loading"] = samples
    plain = samples["computed by plain"]
    rows = [[name, Spread.of(one).text(1), Spread.of(ratios(plain, one)).text()] for name, one in samples.items()]
    findings.table(
        f"First token with {length} tokens of KV from",
        ["", "whole call, ms", "computed / this"],
        rows,
        "Nothing is in a workspace. Disk: a new engine each time; the system may hold the files in its page cache.",
    )


def _timed(engine: KVBoost, text: list[int], *, baseline: bool = False, tier: str = "memory") -> float:
    took, found = _asked(engine, text, baseline=baseline)
    if not baseline and found.get(tier, 0) < _LEAST_FROM_TIER * len(text):
        raise BenchError(f"of {len(text)} tokens too few came from {tier}: {found or 'none at all'}")
    return took


def _asked(engine: KVBoost, text: list[int], *, baseline: bool = False) -> tuple[float, dict[str, int]]:
    """Milliseconds of a call, and how many tokens came from where."""
    results: list[GenerationResult] = []
    took = wall_ms(lambda: results.append(first_token(engine, text, baseline=baseline)))
    return took, dict(results[0].reuse.tiers)


def _from_disk(day: Day, text: list[int], folder: Path) -> Callable[[], float]:
    settings: dict[str, Any] = {"disk_cache_dir": folder, "disk_cache_bytes": _DISK_BYTES, "workspace_bytes": 0}
    with day.engine(**settings) as writer:
        writer.prefill(text)
        writer.flush()

    def sample() -> float:
        with day.engine(**settings) as engine:
            without_deadlines(engine)
            return _timed(engine, text, tier="disk")

    return sample


def _from_host(day: Day, engine: KVBoost, length: int) -> Callable[[], float]:
    """The next of some texts that comes from the host tier. Raises BenchError if none does."""
    texts = cycle([day.prompt(number, length) for number in range(_TEXTS)])

    def sample() -> float:
        for _ in range(3 * _TEXTS):
            took, found = _asked(engine, next(texts))
            engine.flush()
            if found.get("host", 0) >= _LEAST_FROM_TIER * length:
                return took
        raise BenchError(f"of {length} tokens never more than a few came from the host tier; last: {found}")

    return sample


PARTS = {"first tokens": first_tokens, "decoding": decoding, "loading": loading}
