"""What one request may ask for, and how many may be answered at once. The runner decides which is computed next.

Given to the app; read by the schemas' checks, the gate and the connection. Invariant: every limit answers with a
refusal that names it, before anything was computed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from kvboost.errors import ConfigError
from kvboost.serve.errors import ApiError, bad_request


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
            raise ApiError(
                429,
                f"{self._refusal}, this server's limit; try again in a moment",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        self._held[tenant] += amount

    def give_back(self, tenant: str, amount: int = 1) -> None:
        """So much less."""
        self._held[tenant] -= amount
        self._held += Counter()  # keeps those that have any


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
