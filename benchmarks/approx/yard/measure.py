"""One prompt, one history, one strategy: what it does to the answer.

Invariant: everything is compared with one full reading by plain Transformers, and fed its greedy answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.approx.yard import variants
from benchmarks.approx.yard.strategies import Noting, Setting
from benchmarks.common.measure import first_token
from benchmarks.common.quality import Reference, agreement, best_f1, forward, harm
from benchmarks.common.rag import RagPrompt
from benchmarks.internals import Nothing, Repair, SlabCache, family_of, recompute_at, repair_with, repairing
from kvboost.engine import KVBoost
from kvboost.store import MemoryStore
from kvboost.types import GenerationMode, PrefillResult, ReuseReport

_FITS = {
    "variants-fit": {},
    "variants-fit-kept": {"keep_sample": True},
    "variants-fit-passage": {"by_passage": True},
}


class Case:
    """A prompt, its full reading, and which of its passages were seen before."""

    def __init__(self, prompt: RagPrompt, reference: Reference, known: Sequence[bool]) -> None:
        self.prompt, self.reference = prompt, reference
        self._known = np.zeros(len(prompt.tokens), dtype=bool)  # tokens of passages that were seen before
        for (start, end), seen in zip(pairwise(prompt.boundaries), known, strict=True):
            self._known[start:end] = seen

    def measure(self, engine: KVBoost, repair: Repair) -> dict[str, Any]:
        """Reuse whatever is found and repair it like this."""
        begin = time.perf_counter()
        with repairing(engine, repair):
            read = engine.prefill(self.prompt.tokens, boundaries=self.prompt.boundaries)
        took = time.perf_counter() - begin
        return {**self._reuse(read.reuse), "seconds": round(took, 3), **self._behind(engine.model, read)}

    def measure_exact(self, engine: KVBoost, *, warm: bool) -> dict[str, Any]:
        """Exact reuse, with everything before the question stored or with nothing."""
        tokens, boundaries = self.prompt.tokens, self.prompt.boundaries
        engine.clear()
        if warm:
            engine.warm(tokens[: boundaries[-1]], boundaries=boundaries)
        read = engine.prefill(tokens, boundaries=boundaries, mode=GenerationMode.PREFIX_CACHE)
        return {**self._reuse(read.reuse), "reused": True, **self._behind(engine.model, read)}

    def measure_variants(
        self, engine: KVBoost, store: MemoryStore, settings: Sequence[Setting]
    ) -> Iterator[tuple[Setting, dict[str, Any]]]:
        """Every candidate over the variants in the store."""
        end = self.prompt.boundaries[-1]
        with repairing(engine, repair_with(Nothing(), 0.0)):
            nearest = engine.prefill(self.prompt.tokens, boundaries=self.prompt.boundaries)
        passages = variants.stored_variants(engine, store, self.prompt, nearest)
        counts = {"variants": [len(passage.caches) for passage in passages]}
        samples: dict[float, tuple[torch.Tensor, PrefillResult]] = {}
        for setting in settings:
            if setting.name == "variants-nearest":
                yield setting, {**counts, **self.measure(engine, setting.repair(family=family_of(engine)))}
                continue
            if not passages:
                yield setting, {"reused": False, "reason": "no passage has two variants", **counts}
                continue
            if setting.ratio and setting.ratio not in samples:
                samples[setting.ratio] = self._sampled(engine, setting.ratio)
            sample, read = samples.get(setting.ratio, (None, nearest))
            if setting.name == "variants-mean":
                cache = variants.copy_of(nearest.cache, end)
                variants.mean_into(cache, passages)
                if sample is not None:
                    recompute_at(engine, cache, self.prompt.tokens[:end], sample)
            else:
                assert sample is not None
                cache = variants.copy_of(read.cache, end)
                variants.fit_into(cache, passages, sample, **_FITS[setting.name])
            yield setting, {**self._reuse(read.reuse), **counts, **self._over(engine.model, cache)}

    def _sampled(self, engine: KVBoost, ratio: float) -> tuple[torch.Tensor, PrefillResult]:
        """An even sample of positions, recomputed over the nearest variants."""
        noting = Noting()
        with repairing(engine, repair_with(noting, ratio)):
            read = engine.prefill(self.prompt.tokens, boundaries=self.prompt.boundaries)
        return torch.cat(noting.seen), read

    def time_first_token(self, engine: KVBoost, repair: Repair, *, plain_first: bool) -> dict[str, float]:
        """TTFT next to plain Transformers' on the same prompt."""

        def plain() -> float:
            return first_token(engine, self.prompt.tokens, baseline=True).ttft_ms

        def reuse() -> float:
            with repairing(engine, repair):
                return first_token(engine, self.prompt.tokens, boundaries=self.prompt.boundaries).ttft_ms

        if plain_first:
            before, own = plain(), reuse()
        else:
            own, before = reuse(), plain()
        return {"ttft_ms": own, "plain_ms": before}

    def _reuse(self, reuse: ReuseReport) -> dict[str, Any]:
        """What was found of the passages seen before, and what of it was computed again."""
        kinds, lengths = zip(*reuse.segments, strict=True)
        reused = np.repeat([kind != "fresh" for kind in kinds], lengths)
        found: dict[str, Any] = {
            "reused": reuse.moved_tokens > 0,
            "found": float(reused[self._known].mean()) if self._known.any() else 0.0,
            "exact_tokens": reuse.exact_tokens,
            "moved_tokens": reuse.moved_tokens,
            "recomputed": reuse.recomputed_tokens / reuse.moved_tokens if reuse.moved_tokens else 0.0,
        }
        return found if reuse.reason is None else {**found, "reason": reuse.reason}

    def _behind(self, model: Any, read: PrefillResult) -> dict[str, Any]:
        """Feed the full reading's answer behind a whole prompt."""
        logits, forced = read.logits.view(1, -1), self.reference.answer[:-1]
        if forced:
            logits = torch.cat([logits, forward(model, forced, read.cache)])
        return self._score(model, logits, read.cache)

    def _over(self, model: Any, cache: SlabCache) -> dict[str, Any]:
        """Feed the question and the full reading's answer behind the passages."""
        answer = self.reference.answer
        logits = forward(model, [*self.prompt.tail, *answer[:-1]], cache)[-len(answer) :]
        return self._score(model, logits, cache)

    def _score(self, model: Any, logits: torch.Tensor, cache: Any) -> dict[str, Any]:
        reference, gold = self.reference, self.prompt.answers
        answer = reference.answer_after(model, logits, cache)
        said, full = reference.text(answer), reference.text(reference.answer)
        return {
            "tokens": len(reference.answer),
            **agreement(reference.logits, logits),
            **harm(reference.logits, logits),
            "same_answer": answer == reference.answer,
            "answer": said,
            "f1": best_f1(said, gold),
            "full_answer": full,
            "full_f1": best_f1(full, gold),
        }
