"""The draft of an engine: what proposes the tokens that its model verifies, several in one forward.

Made by the engine from its setting ``draft``. Invariant: a draft with another vocabulary than the model's is refused
here; one that does not fit a request is left out of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version

from kvboost.errors import ConfigError
from kvboost.hf.cache import model_is_recurrent
from kvboost.hf.generate import ASSISTANTS, reads_prompt_again, sequences_per_prompt, speculates
from kvboost.hf.loading import ModelSource, load_resident, load_tokenizer

PROMPT_LOOKUP = "prompt-lookup"
_DRAFTS_SLIDE = Version("5.22")  # the oldest version seen to crop a draft's windows correctly; 5.16 does not
_LOOKUP_TOKENS = 10  # as in Transformers' guide


@dataclass(frozen=True)
class Draft:
    """What proposes tokens."""

    name: str
    arguments: dict[str, Any]
    """For ``generate``."""
    max_positions: int | None = None

    def added_to(self, arguments: dict[str, Any], *, model: Any, prompt_tokens: int) -> dict[str, Any]:
        """Arguments of ``generate`` with this draft, or as they are if it does not apply.

        It does not apply to beams, to several samples, to arguments that name a draft themselves
        (``assistant_model=None`` means none), and beyond its own positions. It replaces a draft that the model's
        generation config names.
        """
        own = speculates(None, arguments) or any(name in arguments for name in ASSISTANTS)
        if own or sequences_per_prompt(model, arguments) > 1:
            return arguments
        if self.max_positions is not None and prompt_tokens + arguments["max_new_tokens"] > self.max_positions:
            return arguments
        drafted = {**arguments, **dict.fromkeys(ASSISTANTS), **self.arguments}
        return drafted if reads_prompt_again(model, drafted) is None else arguments


def make_draft(given: Any, *, model: Any, tokenizer: Any) -> Draft:
    """The draft for ``model``: a loaded model, the name or folder of one, or ``"prompt-lookup"``."""
    if getattr(model, "_is_stateful", False) or model_is_recurrent(model):
        raise ConfigError(f"{type(model).__name__} keeps a state from which tokens cannot be removed; leave draft out")
    if given == PROMPT_LOOKUP:
        return Draft(PROMPT_LOOKUP, {"prompt_lookup_num_tokens": _LOOKUP_TOKENS})
    if isinstance(given, str | Path):
        name = str(given)
        source = ModelSource(name, device=str(model.device))
        if tokenizer is not None and tokenizer.get_vocab() != load_tokenizer(source).get_vocab():
            raise ConfigError(
                f"draft={name!r} has another vocabulary than the model; give a smaller model of the same family, or "
                f"{PROMPT_LOOKUP!r}"
            )
        given = load_resident(source)
    elif not hasattr(given, "generate") or not hasattr(given, "config"):
        raise ConfigError(f"draft={given!r} is no model; give one, the folder or name of one, or {PROMPT_LOOKUP!r}")
    else:
        name = type(given).__name__
    sizes = [int(m.config.get_text_config().vocab_size) for m in (given, model)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"draft={name!r} has a vocabulary of {sizes[0]} tokens, the model one of {sizes[1]}; give a smaller model "
            f"of the same family, or {PROMPT_LOOKUP!r}"
        )
    if given.training:
        raise ConfigError("the draft is in training mode, where dropout changes what it proposes; call draft.eval()")
    if _slides(given.config.get_text_config()) and Version(transformers.__version__) < _DRAFTS_SLIDE:
        raise ConfigError(
            f"draft={name!r} attends in windows, which breaks drafts of transformers {transformers.__version__}; "
            f"upgrade to {_DRAFTS_SLIDE}, or give {PROMPT_LOOKUP!r}"
        )
    limit = getattr(given.config.get_text_config(), "max_position_embeddings", None)
    return Draft(name, {"assistant_model": given}, max_positions=limit)


def _slides(config: Any) -> bool:
    """Whether some layers of a model with this config attend to a window only."""
    return "sliding_attention" in (getattr(config, "layer_types", None) or ())
