"""Hands a prepared cache to Transformers' own ``generate``: one sampler for everybody, theirs.

Called by the engine with a cache that holds all of the prompt but its last step. Invariant: nothing is
sampled, filtered or stopped here; only watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvboost.errors import ConfigError

# Arguments of ``generate`` that would contradict what the engine hands over, or change the prompt once read.
_RESERVED = (
    "attention_mask",
    "cache_implementation",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "past_key_values",
    "position_ids",
    "token_healing",
    "use_cache",
)


@dataclass(frozen=True)
class Decoded:
    """What came out of ``generate``."""

    sequences: torch.Tensor  # [batch, prompt + new]
    raw: Any


class _AfterEachToken(StoppingCriteria):  # type: ignore[misc]  # transformers is untyped
    """Calls back after every token; stops everything once the callback says so."""

    def __init__(self, callback: Callable[[], bool]) -> None:
        self._callback = callback

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._callback(), dtype=torch.bool, device=input_ids.device)


def sampling_arguments(*, max_new_tokens: int, temperature: float | None, extra: dict[str, Any]) -> dict[str, Any]:
    """Arguments for ``generate``. ``temperature=0`` means greedy; any other temperature means sampling."""
    for name in _RESERVED:
        if name in extra:
            raise ConfigError(f"{name} is prepared by the engine; leave it out (give the prompt itself instead)")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1; use prefill() to only read a prompt")
    arguments = dict(extra, max_new_tokens=max_new_tokens)
    if temperature is not None:
        if temperature < 0:
            raise ConfigError(f"temperature={temperature} is negative; use 0 for greedy decoding")
        if temperature == 0:
            # The neutral values keep Transformers from warning about sampling settings of the model's config.
            arguments |= {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
        else:
            arguments["temperature"] = temperature
            arguments.setdefault("do_sample", True)
    return arguments


def sequences_per_prompt(model: Any, arguments: dict[str, Any]) -> int:
    """How many rows ``generate`` makes of one prompt: beams or samples."""

    def setting(name: str) -> int:
        given = arguments.get(name, getattr(arguments.get("generation_config"), name, None))
        return int(given or getattr(model.generation_config, name, None) or 1)

    return max(setting("num_beams"), setting("num_return_sequences"))


def run_generate(
    model: Any,
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: Any,
    arguments: dict[str, Any],
    after_each_token: Callable[[], bool],
    tokenizer: Any,
) -> Decoded:
    """Generate behind ``input_ids`` [batch, prompt], of which the cache (or None) already holds a part."""
    arguments = dict(arguments)
    # Ours goes first: it only looks at the clock, and must do so even when another criterion stops the run.
    criteria = StoppingCriteriaList(
        [_AfterEachToken(after_each_token), *(arguments.pop("stopping_criteria", None) or ())]
    )
    if arguments.get("stop_strings") is not None:
        arguments.setdefault("tokenizer", tokenizer)
    if cache is not None:
        # None overrides a cache kind that the model's generation config may ask for.
        arguments |= {"past_key_values": cache, "cache_implementation": None}
    if model.generation_config.pad_token_id is None and "pad_token_id" not in arguments:
        # Transformers would pick the end token too, and warn about it on every call.
        ends = end_token_ids(model, arguments)
        if ends:
            arguments["pad_token_id"] = min(ends)
    with torch.no_grad():
        raw = model.generate(
            input_ids=input_ids, attention_mask=attention_mask, stopping_criteria=criteria, **arguments
        )
    return Decoded(raw if isinstance(raw, torch.Tensor) else raw.sequences, raw)


def end_token_ids(model: Any, arguments: dict[str, Any]) -> set[int]:
    """The tokens that end a generation."""
    given = arguments.get("eos_token_id", getattr(arguments.get("generation_config"), "eos_token_id", None))
    value = given if given is not None else model.generation_config.eos_token_id
    if value is None:
        return set()
    return {int(v) for v in value} if isinstance(value, Iterable) else {int(value)}
