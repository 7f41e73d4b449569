"""Refuses texts that are too long for the model as early as that can be told: a prompt that is read for nothing
takes the time of those that are answered.

Used before a text is tokenised, in worker threads. Invariant: what would fit is never refused here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from kvboost.serve.errors import bad_request

_MOST_CHARACTERS = 32  # of a token; a text with more of them for each token of the limit is not tokenised at all
_MANY_CHARACTERS = 8  # of a token; of a longer text so much is tokenised first
_MARGIN = 1.25  # of the limit in tokens; where a text is cut, its tokens are others


class PromptLengths:
    """The limit of one model's prompts."""

    def __init__(self, tokenizer: Any, limit: int | None) -> None:
        """``limit`` in tokens; None for any number."""
        self._limit = limit
        self._tokenizer = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None

    def check_characters(self, characters: int, *, param: str) -> None:
        """Refuse a text of so many characters if no tokens can hold it."""
        if self._limit is not None and characters > self._limit * _MOST_CHARACTERS:
            raise bad_request(
                f"{param} has {characters} characters, more than {self._limit} tokens can hold; shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def check_text(self, text: str, *, param: str, in_use: AbstractContextManager[Any]) -> None:
        """Refuse a text whose first part has too many tokens. ``in_use`` is held while it is tokenised."""
        self.check_characters(len(text), param=param)
        if self._limit is None or self._tokenizer is None or len(text) <= self._limit * _MANY_CHARACTERS:
            return
        start = text[: self._limit * _MANY_CHARACTERS]
        with in_use:
            # As a batch: only then does the interpreter run others meanwhile.
            tokens = len(self._tokenizer.encode_batch_fast([start], add_special_tokens=False)[0])
        if tokens > self._limit * _MARGIN:
            raise bad_request(
                f"{param} has {len(text)} characters, the first {len(start)} of which are {tokens} tokens; "
                f"{self._limit} fit, so shorten it",
                param=param,
                code="context_length_exceeded",
            )
