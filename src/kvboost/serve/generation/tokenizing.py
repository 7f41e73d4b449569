"""Tokenises prompts in threads of their own, and refuses those that are too long as early as possible.

Used by the endpoints. Invariants: a short prompt never waits for a long one to be tokenised; what would fit is never
refused. In each thread the tenants take turns; in that of large requests they rest for others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from kvboost.serve.errors import bad_request
from kvboost.serve.security.bodies import request_bytes_now
from kvboost.serve.security.fair_pool import FairPool

_LARGE_BYTES = 16 * 2**10  # a text of as many characters is tokenised in some 10 ms
_MOST_CHARACTERS = 32  # of a token; a text with more of them for each token of the limit is not tokenised at all
_MANY_CHARACTERS = 8  # of a token; of a longer text so much is tokenised first
_MARGIN = 1.25  # of the limit in tokens; where a text is cut, its tokens are others

T = TypeVar("T")


class Tokenizing:
    """Runs what tokenises. Raises what a :class:`FairPool` raises."""

    def __init__(self, *, max_waiting: int, large: FairPool) -> None:
        """``large`` reads large requests."""
        self._short = FairPool(max_waiting=max_waiting, name="kvboost-tokenize")
        self._long = large

    @property
    def waiting(self) -> int:
        """Work that has not begun, large bodies to be parsed included."""
        return self._short.waiting + self._long.waiting

    async def run(self, tenant: str, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """What ``work`` returns or raises. Raises a 429 if too many wait."""
        return await self._pool(request_bytes_now()).run(tenant, work, *arguments, **keywords)

    async def finish(self, tenant: str, size: int, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """The same for the end of an answer to a prompt of ``size`` characters. It is never refused."""
        return await self._pool(size).finish(tenant, work, *arguments, **keywords)

    def _pool(self, size: int) -> FairPool:
        return self._long if size > _LARGE_BYTES else self._short

    def close(self) -> None:
        """Begin nothing more."""
        self._short.close()


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
