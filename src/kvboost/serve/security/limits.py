"""What one request may ask for, how many may be answered at once, and what a key may spend per minute.

Given to the app; read by the schemas' checks, the gate and the connection. The runner decides which is computed next.
Invariants: every limit answers with a refusal that names it, before anything was computed, and what would fit is never
refused. A budget per minute fills evenly, up to one minute's worth; a key is let in unless it has overdrawn one; what a
request costs beyond what is left is paid back before the next one; there is one budget for each valid key, so clients
cannot grow the memory.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

from kvboost.errors import ConfigError
from kvboost.serve.errors import ApiError, bad_request, too_many

_MINUTE_S = 60.0
_MOST_CHARACTERS = 32  # of a token; a text with more of them for each token of the limit is not tokenised at all
_MANY_CHARACTERS = 8  # of a token; of a longer text so much is tokenised first
_MARGIN = 1.25  # of the limit in tokens; where a text is cut, its tokens are others


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client and one request may take. Each can be set; see :mod:`kvboost.cli.settings`."""

    max_body_bytes: int = 4 * 2**20
    """Bytes of a request's body."""
    max_json_values: int = 300_000
    """Values of a request's body, numbers of token ids included."""
    max_json_containers: int = 8192
    """Lists and objects of a request's body: messages, their parts and calls, and those in schemas."""
    body_seconds: float = 30.0
    """Time to receive a whole body."""
    max_header_bytes: int = 32 * 2**10
    """Bytes of a request's headers."""
    header_seconds: float = 10.0
    """Time to receive the headers of a request."""
    write_seconds: float = 30.0
    """Time in which a client must take some of what is sent to it."""
    max_connections: int = 1024
    """Open connections."""
    max_streams: int = 256
    """Requests that generate at the same time; more are a 429, unless their key has less than an even share."""
    max_waiting_prompts: int = 256
    """Prompts that wait to be tokenised; more are a 429, unless their key has less than an even share."""
    max_total_body_bytes: int = 256 * 2**20
    """Bytes of the bodies of all requests under way; more are a 429, unless their key has less than an even share."""
    max_remembered_bytes: int = 256 * 2**20
    """Bytes of the conversations kept for ``previous_response_id``; beyond them the key with most loses its oldest.
    A sixteenth of it more is for the token ids of replies, by which a chat that goes on finds their KV."""
    max_requests_per_minute: int | None = None
    """Requests of one key per minute; more are a 429. If left out, any number."""
    max_tokens_per_minute: int | None = None
    """Tokens of one key per minute, prompts and answers; who is over it gets a 429. If left out, any number."""
    max_prompt_tokens: int | None = None
    """Tokens of a prompt. If left out, as many as the model has positions."""
    max_prompts: int = 16
    """Prompts of one call of /v1/completions."""
    max_new_tokens: int | None = None
    """New tokens per answer; also what an answer gets that names no number. If left out, as many as the model has
    positions."""
    max_choices: int = 8
    """Choices per prompt (``n``)."""
    max_messages: int = 2048
    """Messages of a chat."""
    max_stop_strings: int = 4
    """Stop strings of a request."""
    max_stop_characters: int = 256
    """Characters of a stop string."""
    max_logit_bias: int = 300
    """Entries of ``logit_bias``."""
    max_schema_bytes: int = 64 * 2**10
    """Bytes of a JSON schema, or of those of all tools."""
    max_schema_depth: int = 32
    """Levels of a JSON schema."""
    max_tools: int = 128
    """Tools of a request."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise ConfigError(f"{field.name}={value} refuses everything; give a number above 0")


class Shares:
    """Counts what tenants hold of something limited. Used on the event loop only, so it needs no lock."""

    def __init__(self, limit: int, *, refusal: str) -> None:
        """``refusal`` says what there is too much of."""
        self._limit, self._refusal = limit, refusal
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """By all tenants."""
        return self._held.total()

    def add(self, tenant: str, amount: int = 1) -> None:
        """So much more. Raises a 429 if that is too much, and the tenant would have more than its even share."""
        even_share = max(1, self._limit // len({*self._held, tenant}))
        if self.held + amount > self._limit and self._held[tenant] + amount > even_share:
            raise too_many(self._refusal)
        self._held[tenant] += amount

    def give_back(self, tenant: str, amount: int = 1) -> None:
        """So much less."""
        self._held[tenant] -= amount
        self._held += Counter()  # keeps those that have any


class _Budget:
    """So much per minute. May be overdrawn."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._left, self._at = float(per_minute), now

    def left(self, now: float) -> float:
        """What is there now; below zero if it is overdrawn."""
        filled = (now - self._at) * self.per_minute / _MINUTE_S
        self._left, self._at = min(self._left + filled, float(self.per_minute)), now
        return self._left

    def spend(self, amount: int, now: float) -> None:
        """So much less, whether it is there or not."""
        self._left = self.left(now) - amount

    def seconds_until(self, wanted: float, now: float) -> float:
        """Until so much is there."""
        return max(0.0, wanted - self.left(now)) * _MINUTE_S / self.per_minute


class Rates:
    """The budgets of all keys. Used on the event loop only, so it needs no lock."""

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        limited = {"requests": limits.max_requests_per_minute, "tokens": limits.max_tokens_per_minute}
        self._limits = {name: limit for name, limit in limited.items() if limit is not None}
        self._clock = clock
        self._budgets: dict[tuple[str, str], _Budget] = {}

    def _budget(self, key_id: str, name: str, now: float) -> _Budget:
        made = self._budgets.get((key_id, name))
        if made is None:
            made = self._budgets[key_id, name] = _Budget(self._limits[name], now)
        return made

    def enter(self, key_id: str) -> None:
        """One more request of a key. Raises a 429 if it has nothing left."""
        now = self._clock()
        for name, limit in self._limits.items():
            wanted = 1.0 if name == "requests" else 0.0
            wait = self._budget(key_id, name, now).seconds_until(wanted, now)
            if wait > 0:
                raise ApiError(
                    429,
                    f"this key may use {limit} {name} per minute; try again in {math.ceil(wait)} seconds",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(math.ceil(wait)), **self.headers(key_id)},
                )
        if "requests" in self._limits:
            self._budget(key_id, "requests", now).spend(1, now)

    def spend(self, key_id: str, tokens: int) -> None:
        """A request of a key has read or written so many tokens."""
        if "tokens" in self._limits:
            now = self._clock()
            self._budget(key_id, "tokens", now).spend(tokens, now)

    def keep(self, key_ids: Collection[str]) -> None:
        """Forget all keys but these."""
        self._budgets = {of: budget for of, budget in self._budgets.items() if of[0] in key_ids}

    def headers(self, key_id: str) -> dict[str, str]:
        """What is left, in OpenAI's headers; none without limits."""
        now, headers = self._clock(), {}
        for name, limit in self._limits.items():
            budget = self._budget(key_id, name, now)
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(budget.left(now))))
            headers[f"x-ratelimit-reset-{name}"] = f"{budget.seconds_until(limit, now):.3f}s"
        return headers


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


def check_count(count: int, limit: int, *, param: str) -> None:
    """Refuse a list that is too long."""
    if count > limit:
        raise bad_request(f"{param} has {count} entries, this server takes {limit}", param=param, code="too_many")


def check_json(value: Any, *, limits: Limits, param: str) -> None:
    """Refuse JSON from a client that is too deep, too large or no Unicode."""
    depth = limits.max_schema_depth
    if is_deeper(value, depth):
        raise bad_request(f"{param} is nested deeper than {depth} levels", param=param, code="too_deep")
    try:
        size = len(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        raise bad_request(f"{param} holds half of a surrogate pair, which is no text", param=param) from error
    if size > limits.max_schema_bytes:
        raise bad_request(
            f"{param} has {size} bytes, this server takes {limits.max_schema_bytes}", param=param, code="too_large"
        )


def is_deeper(value: Any, limit: int) -> bool:
    """Whether ``value`` is nested deeper than ``limit`` levels. Does not recurse itself."""
    level = [value]
    for _ in range(limit + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return False
        level = inner
    return True
