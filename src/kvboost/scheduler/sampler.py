"""Draws one job's next token from its logits.

Used by the batching, where Transformers' ``generate`` cannot be (see docs/decisions/0014-continuous-batching.md).
Invariant: what a job draws depends on its own logits, settings and seed only, never on who runs beside it.
"""

from __future__ import annotations

import math
from collections import Counter

import torch

from kvboost.errors import ConfigError
from kvboost.scheduler.jobs import Job, NewToken, Sampling


def check_sampling(sampling: Sampling, *, vocab_size: int) -> None:
    """Raise ConfigError for settings nobody can sample with."""
    if not 0.0 <= sampling.temperature < math.inf:
        raise ConfigError(f"temperature={sampling.temperature} cannot be used; give 0 for greedy decoding, or 0.7")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ConfigError(f"top_p={sampling.top_p} is not in (0, 1]; give 1 to allow every token")
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            raise ConfigError(f"{name}={getattr(sampling, name)} is not a number; give 0 for none")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab_size or math.isnan(bias):
            raise ConfigError(
                f"logit_bias {token}: {bias} is not a token of this model (0..{vocab_size - 1}) and a number"
            )


_MIN_TEMPERATURE = 1e-6  # less is the likeliest token all the same, and 0 in float32
_MIN_TOP_P = 1e-6


class Sampler:
    """The sampler of one job. Remembers what it drew."""

    def __init__(self, job: Job, *, device: torch.device) -> None:
        self._settings = job.sampling
        self._top_logprobs = job.top_logprobs
        self._constrain = job.constrain
        self._counts: Counter[int] = Counter()
        self.drawn: list[int] = []
        self._chance: torch.Generator | None = None
        if job.sampling.temperature > 0.0:
            self._chance = torch.Generator(device)
            if job.sampling.seed is not None:
                self._chance.manual_seed(job.sampling.seed)
            else:
                self._chance.seed()
        bias = job.sampling.logit_bias
        self._biased = torch.tensor(list(bias), dtype=torch.long, device=device) if bias else None
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device) if bias else None

    def draw(self, logits: torch.Tensor) -> NewToken:
        """The next token from the model's logits, [vocab], which stay as they are."""
        scores = self._allowed(logits)
        token = int(scores.argmax()) if self._chance is None else self._by_chance(scores, self._chance)
        self.drawn.append(token)
        self._counts[token] += 1
        if self._top_logprobs is None:
            return NewToken(token)
        # The model's own, before any setting: what it thought, not what it was allowed to say.
        logprobs = logits.float().log_softmax(dim=-1)
        values, ids = logprobs.topk(min(self._top_logprobs, len(logprobs)))
        return NewToken(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    def _allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits after penalties, bias and constraint."""
        settings = self._settings
        scores = logits.float()
        penalised = self._counts and (settings.presence_penalty or settings.frequency_penalty)
        if not penalised and self._bias is None and self._constrain is None:
            return scores
        scores = scores.clone() if scores.data_ptr() == logits.data_ptr() else scores
        if penalised:
            ids = torch.tensor(list(self._counts), device=scores.device)
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32, device=scores.device)
            scores[ids] -= settings.presence_penalty + settings.frequency_penalty * counts
        if self._bias is not None and self._biased is not None:
            scores[self._biased] += self._bias
        if self._constrain is not None:
            self._constrain(list(self.drawn), scores)
        if not scores.max() > -torch.inf:  # written so that NaN fails too
            raise ConfigError("no token is allowed here; the constraint or logit_bias forbids them all")
        return scores

    def _by_chance(self, scores: torch.Tensor, chance: torch.Generator) -> int:
        temperature = max(self._settings.temperature, _MIN_TEMPERATURE)
        probabilities = ((scores - scores.max()) / temperature).softmax(dim=-1)
        if self._settings.top_p >= 1.0:
            return int(torch.multinomial(probabilities, 1, generator=chance))
        ordered, ids = probabilities.sort(descending=True)
        # As long as those before it hold less than top_p, a token is in; so the first one always is.
        kept = ordered * (ordered.cumsum(dim=-1) - ordered < max(self._settings.top_p, _MIN_TOP_P))
        return int(ids[torch.multinomial(kept, 1, generator=chance)])
