"""Samples the next tokens of a batch from its logits, through Transformers' logits processors.

Used by the batch runner, which cannot use Transformers' ``generate`` (see docs/decisions/0014-continuous-batching.md).
Invariants: a job's tokens depend on its own logits, settings and seed only, never on other jobs; the device is waited
for once per batch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from kvboost.errors import ConfigError
from kvboost.hf.sampling import logits_processors
from kvboost.scheduler.jobs import Job, NewToken


class Sampler:
    """The sampler of one job. Keeps the generated tokens."""

    def __init__(self, job: Job, *, device: torch.device) -> None:
        self._top_logprobs = job.top_logprobs
        self.generated: list[int] = []
        seen: tuple[int, ...] = ()
        if (drawing := job.drawing) is not None:
            self._processors, seed, samples = drawing.processors, drawing.seed, drawing.seed is not None
            seen = job.token_ids if self._processors else ()
        else:
            seed, samples = job.sampling.seed, job.sampling.temperature > 0.0
            self._processors = logits_processors(
                job.sampling,
                job.constrain,
                self.generated,
                prompt=job.token_ids,
                end_token_ids=job.stop_token_ids,
                device=device,
            )
        # What the processors see: a copy on the device, which grows by tokens that were drawn there.
        self._ids = torch.tensor([seen], dtype=torch.long, device=device)
        self._drawn: torch.Tensor | None = None
        self._generator: torch.Generator | None = None
        if samples:
            self._generator = torch.Generator(device)
            if seed is not None:
                self._generator.manual_seed(seed)
            else:
                self._generator.seed()

    @property
    def takes_likeliest(self) -> bool:
        """Whether nothing but the likeliest token is wanted, which a batch finds for all at once."""
        return self._generator is None and not self._processors and self._top_logprobs is None

    def sample(self, logits: torch.Tensor) -> NewToken:
        """The next token from the model's logits [vocab], which are not modified."""
        [found] = sample_batch([self], logits[None])
        if isinstance(found, Exception):
            raise found
        return found

    def draw(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Integers for :meth:`accept`, as tensors [n] on the device."""
        scores = logits.float()[None]
        allowed = torch.ones(1, dtype=torch.long, device=scores.device)
        if self._processors:
            scores = self._processors(self._ids, scores)
            allowed = (scores.max() > -torch.inf).long()[None]  # not so for NaN either
        if self._generator is None:
            token = scores.max(dim=-1).indices
        else:
            # Where nothing is allowed there is nothing to draw from; accept() says so.
            weights = torch.where(allowed.bool(), scores, 0.0).softmax(dim=-1)
            token = torch.multinomial(weights, 1, generator=self._generator)[0]
        self._drawn = token
        if self._top_logprobs is None:
            return [allowed, token]
        # From the model's own logits, before any processor.
        logprobs = logits.float().log_softmax(dim=-1)
        values, ids = logprobs.topk(min(self._top_logprobs, len(logprobs)))
        return [allowed, token, _bits(logprobs[token]), ids, _bits(values)]

    def accept(self, drawn: Iterator[int]) -> NewToken:
        """The next token, from what was drawn."""
        if not next(drawn):
            raise ConfigError("no token is allowed here; the constraint or logit_bias forbids them all")
        token = next(drawn)
        if self._top_logprobs is None:
            return NewToken(token)
        logprob, *rest = drawn
        ids, values = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        return NewToken(token, _number(logprob), tuple(zip(ids, map(_number, values), strict=True)))

    def keep(self, token_id: int) -> None:
        """The next token is this one, which was accepted."""
        self.generated.append(token_id)
        if self._processors and self._drawn is not None:
            self._ids = torch.cat([self._ids, self._drawn[None].to(self._ids.device)], dim=1)


def sample_batch(samplers: Sequence[Sampler | None], logits: torch.Tensor) -> list[NewToken | Exception]:
    """The next token of every sampler from its row of ``logits`` [batch, vocab], or why there is none.

    Rows without a sampler are passed over; their token means nothing.
    """
    drawn: list[list[torch.Tensor] | Exception] = []
    try:
        likeliest = logits.max(dim=-1).indices  # the first of equal ones; faster than argmax for bfloat16
        for sampler, row in zip(samplers, logits, strict=True):
            try:
                drawn.append([] if sampler is None or sampler.takes_likeliest else sampler.draw(row))
            except Exception as error:  # noqa: BLE001 - a constraint of one job fails for that job only
                drawn.append(error)
        pieces = [piece for found in drawn if not isinstance(found, Exception) for piece in found]
        numbers = iter(torch.cat([likeliest, *pieces]).tolist())  # the one wait for the device
    except Exception as error:  # noqa: BLE001 - without its logits no job of the batch has a next token
        return [error] * len(samplers)
    tokens = list(islice(numbers, len(samplers)))
    results: list[NewToken | Exception] = []
    for sampler, token, found in zip(samplers, tokens, drawn, strict=True):
        if isinstance(found, Exception):
            results.append(found)
            continue
        own = list(islice(numbers, sum(len(piece) for piece in found)))
        try:
            new = sampler.accept(iter(own)) if own and sampler is not None else NewToken(token)
            if sampler is not None:
                sampler.keep(new.token_id)
        except Exception as error:  # noqa: BLE001 - likewise
            results.append(error)
            continue
        results.append(new)
    return results


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """Float32 numbers as integers of the same bits, so that they travel with token ids."""
    return numbers.view(torch.int32).long()


def _number(bits: int) -> float:
    (number,) = struct.unpack("<f", struct.pack("<i", bits))
    return float(number)
