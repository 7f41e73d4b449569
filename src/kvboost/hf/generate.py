"""Passes a prepared cache to Transformers' own ``generate``.

Called by the engine with a cache that holds the prompt up to its last step. Invariant: sampling, filtering and stopping
are left to Transformers.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, StoppingCriteria, StoppingCriteriaList

from kvboost.config import SETTINGS
from kvboost.errors import ConfigError
from kvboost.hf.layers import cache_name, without_peft
from kvboost.hf.runner import in_this_thread

PREPARED = (
    "attention_mask",
    "cache_implementation",
    "cache_params",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "past_key_values",
    "position_ids",
    "prefill_chunk_size",
    "token_healing",
    "use_cache",
)
"""Arguments of ``generate`` that would contradict the engine's own, or change the prompt after its prefill."""
# Arguments of ``generate`` beside the fields of a generation config that choose tokens and leave the forward alone.
# (Guidance by a negative prompt has a forward and a cache of its own.) Whatever else is given, Transformers hands to
# the forward, where it would change the last step of the prompt and not the prefix that came from the cache.
_ALLOWED = (
    "assistant_model",
    "assistant_tokenizer",
    "custom_generate",
    "generation_config",
    "logits_processor",
    "negative_prompt_attention_mask",
    "negative_prompt_ids",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
    "synced_gpus",
    "tokenizer",
    "trust_remote_code",
)
_NO_SETTINGS = ("transformers_version",)  # metadata fields of a generation config
# Assisted decoding feeds the whole prompt in its first forward, whatever a cache holds; custom loops may do anything.
_REREADS_PROMPT = (
    "assistant_early_exit",
    "assistant_model",
    "assistant_tokenizer",
    "constraints",
    "custom_generate",
    "dola_layers",
    "force_words_ids",
    "num_beam_groups",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
    "speculation_type",
    "use_mtp",
)
DEFAULT_NEW_TOKENS = 64
DEFAULT_LENGTH = 20
"""New tokens where nobody says how many, in Transformers."""
_NAMES = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]


@dataclass(frozen=True)
class Decoded:
    """The output of ``generate``."""

    sequences: torch.Tensor  # [batch, prompt + new]
    raw: Any


class _AfterEachToken(StoppingCriteria):  # type: ignore[misc]  # transformers is untyped
    """Calls back after every token; stops the generation once the callback returns True."""

    def __init__(self, callback: Callable[[], bool]) -> None:
        self._callback, self._has_begun = callback, False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self._has_begun:  # the first token is timed, and an accelerator may still be computing it
            int(input_ids[0, -1])
            self._has_begun = True
        return torch.full((input_ids.shape[0],), self._callback(), dtype=torch.bool, device=input_ids.device)


def sampling_arguments(*, prompt_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments for ``generate``. ``temperature=0`` means greedy; any other temperature means sampling.

    Without ``max_new_tokens`` the caller's ``max_length`` or generation config decides, else 64 tokens.
    """
    check_allowed(options)
    arguments = dict(options)
    max_new_tokens, temperature = (arguments.pop(name, None) for name in ("max_new_tokens", "temperature"))
    if max_new_tokens is None:
        max_new_tokens = _requested_length(arguments, prompt_tokens)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1; use prefill() to only prefill a prompt")
    arguments["max_new_tokens"] = max_new_tokens
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


def check_allowed(extra: dict[str, Any]) -> None:
    """Raise ConfigError for the first argument that could change more than which token is chosen."""
    settings = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    allowed = (settings - {*PREPARED, *_NO_SETTINGS}) | {*_ALLOWED}
    for name in extra:
        if name in allowed:
            continue
        if name in PREPARED:
            raise ConfigError(f"{name} is prepared by the engine; leave it out (give the prompt itself instead)")
        if name in SETTINGS:
            raise ConfigError(f"{name} is a setting of the engine; give it to KVBoost() or from_pretrained()")
        if name == "adapter_names":
            raise ConfigError(f"{name} would change the end of the prompt alone; choose with adapter= or set_adapter()")
        if close := difflib.get_close_matches(name, allowed, n=1, cutoff=0.75):
            raise ConfigError(f"generate has no argument {name}; did you mean {close[0]}?")
        raise ConfigError(
            f"{name} may change the prompt's KV, which the stored KV does not reflect; leave it out, or call "
            "engine.model.generate(), which reuses nothing"
        )
    config = extra.get("generation_config")
    for name, value in (("use_cache", False), ("token_healing", True)):
        if getattr(config, name, None) is value:
            raise ConfigError(f"{name}={value} cannot work with a cache; leave it out of generation_config")
    if getattr(config, "prefill_chunk_size", None) is not None:
        raise ConfigError("prefill_chunk_size is the engine's to choose; leave it out of generation_config")


def _requested_length(extra: dict[str, Any], prompt_tokens: int) -> int:
    """New tokens requested by ``max_length`` or a generation config; removes ``max_length`` from ``extra``."""
    config = extra.get("generation_config")
    if (length := extra.pop("max_length", None)) is not None:
        return int(length) - prompt_tokens
    if (count := getattr(config, "max_new_tokens", None)) is not None:
        return int(count)
    if (length := getattr(config, "max_length", None)) is not None:
        return int(length) - prompt_tokens
    return DEFAULT_NEW_TOKENS


def new_tokens_of(model: Any, arguments: dict[str, Any], *, prompt_tokens: int) -> int:
    """How many tokens ``generate`` makes at most with these arguments, as Transformers finds it."""
    for name, before in (("max_new_tokens", 0), ("max_length", prompt_tokens)):  # wherever they are said
        if (given := setting(model, arguments, name)) is not None:
            return int(given) - before
    longest = getattr(model.config, "max_position_embeddings", None)
    return DEFAULT_LENGTH if longest is None else min(DEFAULT_LENGTH, longest - prompt_tokens)


def setting(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """What ``generate`` takes this to be: as given, else by the given configuration, else by the model's."""
    if name in arguments:  # an explicit None means: none
        return arguments[name]
    given = getattr(arguments.get("generation_config"), name, None)
    return given if given is not None else getattr(getattr(model, "generation_config", None), name, None)


def positional_arguments(values: Sequence[Any]) -> dict[str, Any]:
    """The arguments of ``generate`` that were given without their names."""
    return dict(zip(_NAMES, values, strict=False))


def own_generate(model: Any) -> Any:
    """The model's ``generate``: beneath that of :func:`kvboost.attach`, where that is set."""
    return getattr(model.generate, "beneath", model.generate)


def has_dropout(model: Any) -> bool:
    """Whether a forward in training mode draws random numbers."""
    config = model.config.get_text_config()
    told = [value for name, value in vars(config).items() if name.endswith(("dropout", "pdrop", "layerdrop"))]
    return any(isinstance(value, float) and value > 0 for value in told) or any(
        isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()
    )


def reads_prompt_again(model: Any, arguments: dict[str, Any]) -> str | None:
    """Why ``generate`` cannot continue from a cache with these arguments, or None if it can."""
    for name in _REREADS_PROMPT:
        if (given := setting(model, arguments, name)) and not (name == "num_beam_groups" and given == 1):
            return f"with {name}, Transformers feeds the whole prompt again, whatever a cache already holds"
    return None


def sequences_per_prompt(model: Any, arguments: dict[str, Any]) -> int:
    """How many sequences ``generate`` makes of one prompt: beams or samples."""

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
    """Generate after ``input_ids`` [batch, prompt], of which the cache (or None) already holds a part."""
    arguments = dict(arguments)
    # Ours goes first: it only looks at the clock, and must do so even when another criterion stops the run.
    given = arguments.pop("stopping_criteria", None) or ()
    criteria = StoppingCriteriaList([_AfterEachToken(after_each_token), *given])
    if stop_strings(arguments):
        arguments.setdefault("tokenizer", tokenizer)
    if cache is not None:
        # None overrides a cache kind in the model's generation config.
        arguments |= {cache_name(model): cache, "cache_implementation": None}
    arguments = with_padding(model, arguments)
    with torch.no_grad(), _resuming(model, cache):
        raw = own_generate(model)(
            input_ids=input_ids, attention_mask=attention_mask, stopping_criteria=criteria, **arguments
        )
    sequences = raw if isinstance(raw, torch.Tensor) else raw.sequences
    return Decoded(sequences, raw)


@contextmanager
def _resuming(model: Any, cache: Any) -> Iterator[None]:
    """Within this block the first forward begins where the cache ends, also where it has a name of its own.

    Transformers looks for the length of a cache by the usual name only.
    """
    if cache is None or cache_name(model) == "past_key_values":
        yield
        return

    def before(_: Any, given: Any, inputs: dict[str, Any]) -> Any:
        hook.remove()
        return given, {**inputs, "input_ids": inputs["input_ids"][:, cache.get_seq_length() :]}

    hook = without_peft(model).register_forward_pre_hook(in_this_thread(before), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def with_padding(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with an end token for padding, as Transformers would pick it, with a warning in every call."""
    if pad_token_id(model, arguments) is None and (ends := end_token_ids(model, arguments)):
        return {**arguments, "pad_token_id": min(ends)}
    return arguments


def stop_strings(arguments: dict[str, Any]) -> list[str]:
    """The texts that end a generation."""
    config = arguments.get("generation_config")
    stops = arguments.get("stop_strings", getattr(config, "stop_strings", None)) or []
    return [stops] if isinstance(stops, str) else list(stops)


def end_token_ids(model: Any, arguments: dict[str, Any]) -> set[int]:
    """The tokens that end a generation."""
    value = arguments.get("eos_token_id")
    if "eos_token_id" not in arguments:  # an explicit None means: never end
        value = getattr(arguments.get("generation_config"), "eos_token_id", None)
        value = value if value is not None else model.generation_config.eos_token_id
    if value is None:
        return set()
    return {int(v) for v in value} if isinstance(value, Iterable) else {int(value)}


def pad_token_id(model: Any, arguments: dict[str, Any]) -> int | None:
    """The token that pads sequences of a batch that ended early."""
    for value in (
        arguments.get("pad_token_id"),
        getattr(arguments.get("generation_config"), "pad_token_id", None),
        model.generation_config.pad_token_id,
    ):
        if value is not None:
            return int(value)
    return None
