"""Builds Transformers' logits processors for batches, from sampling settings or from arguments of ``generate``.

Used by :mod:`kvboost.scheduler.jobs`, which cannot use ``model.generate``, and for ``generate_batch``. Invariant:
what Transformers has a processor for is done by that processor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerationMode

from kvboost.errors import ConfigError
from kvboost.hf.generate import stop_strings, with_padding

Constraint = Callable[[list[int], torch.Tensor], None]
"""Given the new tokens so far and the next one's logits [vocab], forbids tokens in place."""
_MIN_TEMPERATURE = 1e-6  # below that it is greedy anyway, and 0 in float32
_MIN_TOP_P = 1e-6
# Arguments that want Transformers' own loop, or that may remember what they have seen of one sequence.
_OWN_LOOP = (
    "custom_generate",
    "logits_processor",
    "negative_prompt_ids",
    "stopping_criteria",
    "streamer",
    "synced_gpus",
)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled. The default is greedy decoding."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 for all."""
    min_p: float = 0.0
    """Sample from tokens that are at least this share as likely as the likeliest."""
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Above 1 for fewer repetitions. Counts the prompt too, unlike the two above."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    """No token ends the answer before it has these."""

    def check(self, *, vocab_size: int) -> None:
        """Raise ConfigError for invalid settings."""
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} cannot be used; give 0 for greedy decoding, or 0.7")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} is not in (0, 1]; give 1 to allow every token")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} is below 0; give 0 to allow every token")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p={self.min_p} is not in [0, 1]; give 0 to allow every token")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ConfigError(f"repetition_penalty={self.repetition_penalty} is not above 0; give 1 for none")
        if self.min_new_tokens < 0:
            raise ConfigError(f"min_new_tokens={self.min_new_tokens} is below 0; give 0 to allow any length")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)} is not a number; give 0 for none")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size or math.isnan(bias) or bias == math.inf:
                raise ConfigError(
                    f"logit_bias {token}: {bias} is not a token of this model (0..{vocab_size - 1}) and a number"
                )


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How one request's tokens are drawn and what stops it, as Transformers made it of the arguments of ``generate``.

    Both are given the prompt and the new tokens, [1, n].
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    """Beside end tokens and the length."""
    seed: int | None
    """None for greedy decoding."""


def logits_processors(
    sampling: Sampling,
    constraint: Constraint | None,
    generated: Sequence[int],
    *,
    prompt: Iterable[int] = (),
    end_token_ids: Iterable[int] = (),
    device: torch.device | str = "cpu",
) -> LogitsProcessorList:
    """The processors applied to scores [1, vocab] on ``device`` before sampling, given the new tokens so far [1, n].

    ``generated`` are the same tokens, kept up to date by the caller: a constraint reads them here, not on the device.
    """
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(_RepetitionPenalty(float(sampling.repetition_penalty), prompt, device))
    if sampling.presence_penalty or sampling.frequency_penalty:
        processors.append(_CountPenalty(sampling.presence_penalty, sampling.frequency_penalty))
    if sampling.logit_bias:
        bias = {(int(token),): float(value) for token, value in sampling.logit_bias.items()}
        processors.append(SequenceBiasLogitsProcessor(bias))
    if sampling.min_new_tokens and (ends := sorted(end_token_ids)):
        processors.append(MinNewTokensLengthLogitsProcessor(0, sampling.min_new_tokens, ends, device=str(device)))
    if constraint is not None:
        processors.append(_Constrained(constraint, generated))
    if sampling.temperature > 0.0:
        processors.append(TemperatureLogitsWarper(max(float(sampling.temperature), _MIN_TEMPERATURE)))
        if sampling.top_k:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            processors.append(TopPLogitsWarper(max(float(sampling.top_p), _MIN_TOP_P)))
        if sampling.min_p:
            processors.append(MinPLogitsWarper(float(sampling.min_p)))
    return processors


def drawings(
    model: Any, prompts: Sequence[list[int]], arguments: Sequence[dict[str, Any]], *, tokenizer: Any
) -> list[Drawing | None]:
    """How to draw the next tokens of each prompt with its arguments, as ``generate`` does; None where that takes more.

    Samples are seeded by torch's own generator.
    """
    own = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT wraps it
    if "generate" in vars(own) or getattr(type(own), "generate", None) is not GenerationMixin.generate:
        return [None] * len(prompts)
    stopping: dict[tuple[int, tuple[str, ...]], StopStringCriteria] = {}  # one reads the whole vocabulary

    def stopped_by(given: dict[str, Any], stops: list[str]) -> list[StopStringCriteria] | None:
        chosen = given.get("tokenizer") or tokenizer
        if not stops or chosen is None:
            return None if stops else []  # ``generate`` says that a tokenizer is missing
        key = (id(chosen), tuple(stops))
        if key not in stopping:
            stopping[key] = StopStringCriteria(chosen, stops)
        return [stopping[key]]

    found: list[Drawing | None] = []
    for tokens, given in zip(prompts, arguments, strict=True):
        criteria = stopped_by(given, stop_strings(given))
        if criteria is None or own.generation_config.stop_strings or any(given.get(n) is not None for n in _OWN_LOOP):
            found.append(None)
            continue
        config = copy.copy(given.get("generation_config"))
        if config is not None:
            config.stop_strings = None  # Transformers hands no tokenizer on to a loop that is not its own
        ids = torch.tensor([tokens], device=own.device)
        ours = {"use_cache": False, "custom_generate": _drawing, "generation_config": config}
        given = {name: value for name, value in given.items() if name not in ("stop_strings", "tokenizer")}
        drawing = own.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **with_padding(own, given) | ours)
        if drawing is not None:
            drawing = replace(drawing, criteria=StoppingCriteriaList([*criteria, *drawing.criteria]))
        found.append(drawing)
    return found


def _drawing(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **_: Any,
) -> Drawing | None:
    """Called by ``generate`` in place of its loop, with all that it made of its arguments."""
    mode, guidance = generation_config.get_generation_mode(), generation_config.guidance_scale
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or guidance not in (None, 1.0):
        return None
    if generation_config.num_return_sequences > 1 or generation_config.return_dict_in_generate:
        return None
    seed = int(torch.randint(2**62, ())) if mode is GenerationMode.SAMPLE else None
    others = [one for one in stopping_criteria if not isinstance(one, MaxLengthCriteria | EosTokenCriteria)]
    return Drawing(processors=logits_processor, criteria=StoppingCriteriaList(others), seed=seed)


class _RepetitionPenalty(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """Transformers' penalty over the prompt and the new tokens; the other processors see the new tokens only."""

    def __init__(self, penalty: float, prompt: Iterable[int], device: torch.device | str) -> None:
        self._over_all = RepetitionPenaltyLogitsProcessor(penalty)
        # Each token once: the penalty does not count them, and a long prompt would be copied for every new token.
        self._prompt = torch.tensor([sorted(set(prompt))], dtype=torch.long, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = torch.cat([self._prompt, input_ids.to(self._prompt.device, non_blocking=True)], dim=1)
        found: torch.Tensor = self._over_all(ids, scores)
        return found


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
