"""Samples one job's next token from its logits, through Transformers' logits processors.

Used by the batch runner, which cannot use Transformers' ``generate`` (see docs/decisions/0014-continuous-batching.md).
Invariant: a job's tokens depend on its own logits, settings and seed only, never on other jobs.
"""

from __future__ import annotations

import torch

from kvboost.errors import ConfigError
from kvboost.hf.sampling import logits_processors
from kvboost.scheduler.jobs import Job, NewToken


class Sampler:
    """The sampler of one job. Keeps the generated tokens."""

    def __init__(self, job: Job, *, device: torch.device) -> None:
        self._top_logprobs = job.top_logprobs
        self._processors = logits_processors(job.sampling, job.constrain)
        self._device = device
        self.generated: list[int] = []
        self._generator: torch.Generator | None = None
        if job.sampling.temperature > 0.0:
            self._generator = torch.Generator(device)
            if job.sampling.seed is not None:
                self._generator.manual_seed(job.sampling.seed)
            else:
                self._generator.seed()

    def sample(self, logits: torch.Tensor) -> NewToken:
        """The next token from the model's logits [vocab], which are not modified."""
        scores = logits.float()[None]
        if self._processors:
            scores = self._processors(torch.tensor([self.generated], dtype=torch.long, device=self._device), scores)
            if not scores.max() > -torch.inf:  # written so that NaN fails too
                raise ConfigError("no token is allowed here; the constraint or logit_bias forbids them all")
        if self._generator is None:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator))
        self.generated.append(token)
        if self._top_logprobs is None:
            return NewToken(token)
        # From the model's own logits, before any processor.
        logprobs = logits.float().log_softmax(dim=-1)
        values, ids = logprobs.topk(min(self._top_logprobs, len(logprobs)))
        return NewToken(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
