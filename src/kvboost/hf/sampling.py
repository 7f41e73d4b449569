"""Builds Transformers' logits processors from sampling settings, for batches.

Used by :mod:`kvboost.scheduler.sampler`, which cannot use ``model.generate``. Invariant: what Transformers has a
processor for is done by that processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from kvboost.errors import ConfigError

Constraint = Callable[[list[int], torch.Tensor], None]
"""Given the new tokens so far and the next one's logits [vocab], forbids tokens in place."""
_MIN_TEMPERATURE = 1e-6  # below that it is greedy anyway, and 0 in float32
_MIN_TOP_P = 1e-6


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled. The default is greedy decoding."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def check(self, *, vocab_size: int) -> None:
        """Raise ConfigError for invalid settings."""
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} cannot be used; give 0 for greedy decoding, or 0.7")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} is not in (0, 1]; give 1 to allow every token")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)} is not a number; give 0 for none")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size or math.isnan(bias) or bias == math.inf:
                raise ConfigError(
                    f"logit_bias {token}: {bias} is not a token of this model (0..{vocab_size - 1}) and a number"
                )


def logits_processors(
    sampling: Sampling, constraint: Constraint | None, generated: Sequence[int]
) -> LogitsProcessorList:
    """The processors applied to scores [1, vocab] before sampling, given the new tokens so far [1, n].

    ``generated`` are the same tokens, kept up to date by the caller: a constraint reads them here, not on the device.
    """
    processors = LogitsProcessorList()
    if sampling.presence_penalty or sampling.frequency_penalty:
        processors.append(_CountPenalty(sampling.presence_penalty, sampling.frequency_penalty))
    if sampling.logit_bias:
        bias = {(int(token),): float(value) for token, value in sampling.logit_bias.items()}
        processors.append(SequenceBiasLogitsProcessor(bias))
    if constraint is not None:
        processors.append(_Constrained(constraint, generated))
    if sampling.temperature > 0.0:
        processors.append(TemperatureLogitsWarper(max(float(sampling.temperature), _MIN_TEMPERATURE)))
        if sampling.top_p < 1.0:
            processors.append(TopPLogitsWarper(max(float(sampling.top_p), _MIN_TOP_P)))
    return processors


class _CountPenalty(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """OpenAI's presence and frequency penalties, over the new tokens; Transformers has none of them."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not input_ids.shape[1]:
            return scores
        # Counted where the scores are: finding out which tokens are distinct would make the host wait.
        ids = input_ids.to(scores.device, non_blocking=True)
        counts = torch.zeros_like(scores).scatter_add_(1, ids, torch.ones_like(ids, dtype=scores.dtype))
        return torch.where(counts > 0, scores - (self._presence + self._frequency * counts), scores)


class _Constrained(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """Forbids what a grammar does not allow."""

    def __init__(self, constraint: Constraint, generated: Sequence[int]) -> None:
        self._constraint, self._generated = constraint, generated

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        self._constraint(list(self._generated), scores[0])
        return scores
