"""A tokenizer for a process that has no model: loaded without torch.

Used by a fleet's router. Transformers' ``AutoTokenizer`` imports torch, which takes seconds and hundreds of megabytes.
"""

from __future__ import annotations

from typing import Any

from kvboost.errors import ConfigError


def light_tokenizer(name_or_path: str) -> Any:
    """The fast tokenizer of a model. Raises ConfigError if there is none."""
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name_or_path!r} has no tokenizer.json that can be read ({error})") from error
