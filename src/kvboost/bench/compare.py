"""Plain Transformers and our engine around one loaded model: the same prompts in turn, request by request.

Called by :mod:`kvboost.cli.bench` and :mod:`kvboost.bench.mine`; ``benchmarks/bench`` takes the same turns with rivals.
Invariants: both get the same token ids, and who goes first changes with every request; a clock runs from the call until
Python has the first new token's id; a ratio is taken of two requests that were asked in the same turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with transformers

from kvboost.bench.report import Spread, Table, describe_machine, ratios, say
from kvboost.bench.workloads import RECIPES, Request, build
from kvboost.config import EngineConfig
from kvboost.engine import KVBoost
from kvboost.errors import ConfigError
from kvboost.hf.generate import end_token_ids, pad_token_id, sampling_arguments
from kvboost.hf.loading import ModelSource, load_resident, load_tokenizer

R = TypeVar("R", bound=Request)
EXACT = "exact"
_PLAIN = "plain"
_COLD = 3  # prompts of each workload that are asked with empty caches

Sample = Mapping[str, Any]
"""One answer: ``tokens``, ``ttft_ms``, ``total_ms``; of ours also tokens of the prompt: ``exact``, ``approximate`` and
``moved``."""


@dataclass
class Pairing:
    """One workload, others (here plain Transformers) and one engine of ours. Lists go together, request by request."""

    workload: str
    engine: str
    """Its quality."""
    prompts: list[int] = field(default_factory=list)
    """Tokens of each prompt that counts."""
    theirs: list[Sample] = field(default_factory=list)
    ours: list[Sample] = field(default_factory=list)
    cold_theirs: list[Sample] = field(default_factory=list)
    cold_ours: list[Sample] = field(default_factory=list)

    def add(self, prompt: int, theirs: Sample, ours: Sample) -> None:
        """Both answers to a prompt of so many tokens."""
        self.prompts.append(prompt)
        self.theirs.append(theirs)
        self.ours.append(ours)

    def ratio(self, name: str = "ttft_ms", *, cold: bool = False) -> list[float]:
        """Theirs by ours, pair by pair: above one, ours was faster."""
        theirs, own = (self.cold_theirs, self.cold_ours) if cold else (self.theirs, self.ours)
        return ratios([one[name] for one in theirs], [max(one[name], 1e-3) for one in own])

    def share(self, name: str) -> float:
        """Prompt tokens of a kind (``exact``, ``approximate``), of all."""
        return float(sum(one[name] for one in self.ours) / max(1, sum(self.prompts)))

    def same_answers(self) -> tuple[int, int]:
        """Greedy answers of ours that are theirs, and all."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return sum(a["tokens"] == b["tokens"] for a, b in pairs), len(self.ours)

    def reuse_cells(self) -> list[str]:
        """The cells of :data:`REUSE`."""
        same, count = self.same_answers()
        return [*(f"{100 * self.share(name):.0f}" for name in ("exact", "approximate")), f"{same} of {count}"]


REUSE = ("exact %", "approx %", "same answer")
NOTES = (
    "Times are milliseconds from the call to the first token, as medians. faster: plain ms by ours, pair by pair, as "
    "median [lowest highest]; cold: the same of whole calls for one token with empty caches, storing included.",
    "exact and approx: prompt tokens that were not computed, by trust. same answer: greedy answers equal to plain's.",
)
COLUMNS = ("workload", "ours", "plain ms", "ours ms", "faster", "cold", *REUSE)


def row(pairing: Pairing) -> list[str]:
    """The cells of :data:`COLUMNS`."""
    return [
        pairing.workload,
        pairing.engine,
        *(f"{statistics.median(one['ttft_ms'] for one in side):.0f}" for side in (pairing.theirs, pairing.ours)),
        Spread.of(pairing.ratio()).text(),
        Spread.of(pairing.ratio("total_ms", cold=True)).text() if pairing.cold_ours else "-",
        *pairing.reuse_cells(),
    ]


def take_turns(
    asked: Mapping[str, Callable[[R], Sample]], requests: Sequence[R], answered: Callable[[], object]
) -> dict[str, list[Sample]]:
    """Everyone's answers. Who goes first changes with every request. ``answered`` is called after each answer."""
    answers: dict[str, list[Sample]] = {name: [] for name in asked}
    names = list(asked)
    for number, request in enumerate(requests):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            answers[name].append(asked[name](request))
            answered()
    return answers


def spread_out(requests: Sequence[R], count: int) -> list[R]:
    """So many of the requests, at equal distances: those of the cold control."""
    count = min(count, len(requests))
    return [requests[(2 * number + 1) * len(requests) // (2 * count)] for number in range(count)]


def compare(workload: str, requests: Sequence[Request], engine: KVBoost, *, new: int, cold: int) -> Pairing:
    """Plain Transformers against an engine of ours, on its model.

    ``cold`` prompts are asked again, for one token: their time is the prompt's and what it takes to keep its KV.
    """
    quality = str(engine.config.quality)
    controls = spread_out(requests, cold)
    total = 2 * (1 + len(requests) + len(controls))

    def asked(new: int, *, forget: bool = False) -> dict[str, Callable[[Request], Sample]]:
        ours = partial(_ask_ours, engine, new=new, forget=forget)
        return {quality: ours, _PLAIN: partial(_ask_plain, engine.model, new=new)}

    with tqdm(total=total, unit="answer", desc=f"{workload}, quality {quality}", leave=False, delay=2) as bar:
        # Not counted: first calls of kernels and of memory. Ours goes first: of a prompt that is too long it says so.
        take_turns(asked(2), [max(requests, key=lambda request: len(request.tokens))], bar.update)
        engine.clear()
        warm = take_turns(asked(new), requests, bar.update)
        alone = take_turns(asked(1, forget=True), controls, bar.update)
    pairing = Pairing(workload, quality, cold_theirs=alone[_PLAIN], cold_ours=alone[quality])
    for request, theirs, ours in zip(requests, warm[_PLAIN], warm[quality], strict=True):
        if request.counts:
            pairing.add(len(request.tokens), theirs, ours)
    return pairing


class _Watch:
    """A streamer for ``generate`` that looks at the clock. The prompt is put before the first new token."""

    def __init__(self) -> None:
        self._puts = 0
        self._begin = self._first = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """New ids."""
        value.tolist()  # a token is usable once it has left the accelerator
        self._puts += 1
        if self._puts == 2:
            self._first = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to do."""

    def times(self) -> dict[str, float]:
        """Milliseconds to the first token and until now."""
        moments = {"ttft_ms": self._first, "total_ms": time.perf_counter()}
        return {name: 1000 * (moment - self._begin) for name, moment in moments.items()}


def _ask_plain(model: Any, request: Request, *, new: int) -> Sample:
    """``model.generate``, with the arguments that our engine gives it."""
    options = {"max_new_tokens": new, "temperature": 0}
    arguments = sampling_arguments(prompt_tokens=len(request.tokens), options=options)
    if pad_token_id(model, arguments) is None:  # Transformers would say so on every call
        arguments["pad_token_id"] = min(end_token_ids(model, arguments), default=None)
    watch = _Watch()
    ids = torch.tensor([request.tokens], device=model.device)  # [1, prompt]
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=watch, **arguments)
    return {**watch.times(), "tokens": out[0, ids.shape[1] :].tolist()}


def _ask_ours(engine: KVBoost, request: Request, *, new: int, forget: bool) -> Sample:
    if forget:
        engine.clear()
    watch = _Watch()
    result = engine.generate(
        request.tokens, boundaries=request.boundaries, max_new_tokens=new, temperature=0, streamer=watch
    )
    reuse = result.reuse
    return {
        **watch.times(),
        "tokens": list(result.token_ids),
        "exact": reuse.exact_tokens,
        "approximate": reuse.moved_tokens - reuse.recomputed_tokens,
        "moved": reuse.moved_tokens,
    }


def quality_settings(quality: str) -> dict[str, Any]:
    """An engine's settings for ``--quality``. A share has no checks here: they would run while others are timed."""
    if quality == "auto":
        raise ConfigError("quality auto begins as exact and needs idle time for its checks; give high, fast or a share")
    share = quality[:1].isdigit()
    try:
        settings = {"quality": float(quality), "shadow_share": 0.0} if share else {"quality": quality}
        EngineConfig(**settings)
    except ValueError as error:
        known = "exact, high, fast or a share such as 0.1"
        raise ConfigError(f"--quality {quality!r} is not known; give {known}") from error
    return settings


def bench(
    source: ModelSource, workloads: Sequence[str], *, tokens: int, new: int, seed: int, quality: str
) -> tuple[Table, bool]:
    """Workloads on a model: exact reuse, and ``quality`` where text moves.

    Returns the table, and whether every warm prefill had the bits of a cold one.
    """
    tokenizer = load_tokenizer(source)
    built = {name: build(RECIPES[name], tokenizer, tokens=tokens, seed=seed) for name in workloads}
    say(f"loading {source.name}")
    model = load_resident(source)
    machine = describe_machine(dtype=str(model.dtype).removeprefix("torch."), model=source.name)
    table = Table(f"Time to the first token, prompts of about {tokens} tokens", machine, COLUMNS)
    same_bits = 0
    for name, requests in built.items():
        for tried in dict.fromkeys((EXACT, quality) if RECIPES[name].moves else (EXACT,)):
            with KVBoost(model, tokenizer, **quality_settings(tried)) as engine:
                pairing = compare(name, requests, engine, new=new, cold=_COLD)
                same_bits += tried == EXACT and engine.verify_correctness(requests[-1].tokens)
            table.add(*row(pairing))
            say(f"{name}: first tokens {Spread.of(pairing.ratio()).text()} times as fast with quality {tried}")
    table.notes += [*NOTES, f"A warm prefill has the bits of a cold one in {same_bits} of {len(built)} workloads."]
    return table, same_bits == len(built)
