"""How near an answer over reused KV comes to the reference: plain Transformers, which computes the whole prompt.

Used by the benchmarks of non-prefix reuse and of codecs. Invariant: both sides are fed the reference's greedy answer,
so that every position is compared behind the same tokens.
"""

from __future__ import annotations

import re
import string
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.bench.rivals.quality import agreement, harm
from benchmarks.common import rag
from kvboost.engine import KVBoost
from kvboost.types import GenerationMode, PrefillResult

__all__ = [
    "SEED",
    "Reference",
    "agreement",
    "best_f1",
    "compare",
    "end_tokens",
    "forward",
    "harm",
    "interval",
    "mean_cell",
    "normalised",
    "quality_cells",
]

SEED = 1  # of the confidence intervals
_BOOTSTRAP_ROUNDS = 2000
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Reference:
    """The prompt prefilled in one go by plain Transformers, and its greedy answer."""

    def __init__(self, engine: KVBoost, prompt: rag.RagPrompt, *, tokens: int) -> None:
        self._tokenizer = engine.tokenizer
        self._tokens = tokens
        self._ends = end_tokens(engine.model)
        read = engine.prefill(prompt.tokens, mode=GenerationMode.BASELINE)
        self.answer, self.logits = self.answer_behind(engine.model, read)
        """Token ids, the end token included if it came, and the logits each was chosen from: [tokens, vocab]."""

    def answer_behind(self, model: Any, read: PrefillResult) -> tuple[list[int], torch.Tensor]:
        """The greedy answer of at most as many tokens, and its logits [tokens, vocab]."""
        answer: list[int] = []
        logits = [read.logits]
        while True:
            answer.append(int(logits[-1].argmax()))
            if len(answer) == self._tokens or answer[-1] in self._ends:
                return answer, torch.stack(logits)
            logits.append(forward(model, answer[-1:], read.cache)[0])

    def answer_after(self, model: Any, logits: torch.Tensor, cache: Any) -> list[int]:
        """The greedy answer of a reading that was fed this one's answer and gave ``logits`` [tokens, vocab] for it.

        ``cache`` ends with this answer but its last token. Up to the first other choice nothing needs to be computed.
        """
        best = logits.argmax(dim=-1).tolist()
        pairs = zip(best, self.answer, strict=True)
        same = next((place for place, (own, full) in enumerate(pairs) if own != full), len(best))
        if same == len(best):
            return list(self.answer)
        if surplus := len(best) - 1 - same:
            cache.crop(-surplus)
        answer = [*self.answer[:same], best[same]]
        while len(answer) < self._tokens and answer[-1] not in self._ends:
            answer.append(int(forward(model, answer[-1:], cache)[0].argmax()))
        return answer

    def text(self, answer: Sequence[int]) -> str:
        """What an answer says."""
        return str(self._tokenizer.decode([token for token in answer if token not in self._ends])).strip()

    def record(self, prompt: rag.RagPrompt) -> dict[str, Any]:
        """For the file of samples."""
        said = self.text(self.answer)
        sizes = {"prompt_tokens": len(prompt.tokens), "passage_tokens": prompt.passage_tokens}
        return {**sizes, "answer": said, "answer_tokens": len(self.answer), "f1": best_f1(said, prompt.answers)}


def end_tokens(model: Any) -> set[int]:
    """The tokens at which this model's answers end."""
    ends = model.generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


@torch.no_grad()
def forward(model: Any, tokens: Sequence[int], cache: Any) -> torch.Tensor:
    """The logits [tokens, vocab] of these tokens behind ``cache``, which grows by them."""
    ids = torch.tensor([list(tokens)], device=model.get_input_embeddings().weight.device)  # [1, tokens]
    logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits[0]


def compare(engine: KVBoost, prompt: rag.RagPrompt, reference: Reference, *, f1: bool = False) -> dict[str, Any]:
    """Prefill ``prompt`` with reused passages, feed the reference's answer behind it, and say how far the two agree."""
    begin = time.perf_counter()
    read = engine.prefill(prompt.tokens, boundaries=prompt.boundaries)
    took = 1000.0 * (time.perf_counter() - begin)
    if not rag.passages_reused(prompt, read.reuse):
        return {"reused": False, "reason": read.reuse.reason, "prefill_ms": took}
    logits = read.logits.view(1, -1)
    forced = reference.answer[:-1]
    if forced:
        logits = torch.cat([logits, forward(engine.model, forced, read.cache)])
    sample: dict[str, Any] = {
        "reused": True,
        "moved_tokens": read.reuse.moved_tokens,
        "recomputed_tokens": read.reuse.recomputed_tokens,
        "recomputed": read.reuse.recomputed_tokens / read.reuse.moved_tokens,
        "error_estimate": read.reuse.error_estimate,
        "prefill_ms": took,
        "stages_ms": dict(read.reuse.timings_ms),
        **agreement(reference.logits, logits),
    }
    if f1:
        read.cache.crop(-len(forced))
        answer, _ = reference.answer_behind(engine.model, read)
        sample["answer"] = reference.text(answer)
        sample["f1"] = best_f1(sample["answer"], prompt.answers)
    return sample


def normalised(answer: str) -> list[str]:
    """The words of an answer as SQuAD compares them: lower case, no punctuation, no articles."""
    bare = "".join(char for char in answer.lower() if char not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def best_f1(answer: str, gold: Sequence[str]) -> float:
    """Token F1 against the gold answer that fits best."""
    return max((_f1(normalised(answer), normalised(right)) for right in gold), default=0.0)


def _f1(said: list[str], right: list[str]) -> float:
    if not said or not right:
        return float(said == right)
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the ends of its 95 % interval by bootstrap over the values."""
    array = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(SEED).integers(0, len(array), (_BOOTSTRAP_ROUNDS, len(array)))
    low, high = np.percentile(array[drawn].mean(axis=1), [2.5, 97.5])
    return float(array.mean()), float(low), float(high)


def mean_cell(samples: Sequence[dict[str, Any]], name: str, *, factor: float = 1.0, digits: int = 4) -> str:
    """``mean [low high]`` of one figure of the samples, with its 95 % interval."""
    mean, low, high = (factor * x for x in interval([sample[name] for sample in samples]))
    return f"{mean:.{digits}f} [{low:.{digits}f} {high:.{digits}f}]"


def quality_cells(samples: Sequence[dict[str, Any]]) -> list[str]:
    """KL and top-1 in per cent: the two figures every table of quality has."""
    return [mean_cell(samples, "kl"), mean_cell(samples, "top1", factor=100, digits=1)]
