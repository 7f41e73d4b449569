"""What one request may ask for, and how many may be answered at once; who computes next is the runner's to say.

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
    """The most of everything. Seconds are real time."""

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    """To receive a whole body."""
    header_bytes: int = 32 * 2**10
    header_seconds: float = 10.0
    """To receive the headers of a request."""
    write_seconds: float = 30.0
    """In which a client takes something of what is sent to it."""
    connections: int = 1024
    streams: int = 256
    """Requests that generate at the same time; more are a 429, unless their key has less than an even share."""
    prompt_tokens: int | None = None
    """None: what the model reads."""
    prompts: int = 16
    """Of one call of /v1/completions."""
    new_tokens: int = 4096
    """Per answer; also what an answer gets that names no number."""
    n: int = 8
    messages: int = 2048
    stop_strings: int = 4
    stop_characters: int = 256
    logit_bias: int = 300
    schema_bytes: int = 64 * 2**10
    schema_depth: int = 32
    tools: int = 128

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise ConfigError(f"limit {field.name}={value} refuses everything; give a number above 0")


class Streams:
    """Counts the requests that generate, by tenant. Used on the event loop only, so it needs no lock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """Of all tenants."""
        return self._of.total()

    def enter(self, tenant: str) -> None:
        """One more. Raises a 429 if there are too many, of which the tenant has its even share."""
        if self.running >= self._most and self._of[tenant] >= max(1, self._most // len({*self._of, tenant})):
            raise ApiError(
                429,
                f"{self._most} requests are being answered, the most this server takes; try again in a moment",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        self._of[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One less."""
        self._of[tenant] -= 1
        self._of += Counter()  # keeps those that have any


def check_count(found: int, most: int, *, param: str) -> None:
    """Refuse a list that is too long."""
    if found > most:
        raise bad_request(f"{param} has {found} entries, this server takes {most}", param=param, code="too_many")


def check_json(value: Any, *, limits: Limits, param: str) -> None:
    """Refuse JSON from a client that is too deep, too large or no Unicode."""
    if depth_beyond(value, limits.schema_depth):
        raise bad_request(f"{param} is nested deeper than {limits.schema_depth} levels", param=param, code="too_deep")
    try:
        size = len(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        raise bad_request(f"{param} holds half of a surrogate pair, which is no text", param=param) from error
    if size > limits.schema_bytes:
        raise bad_request(
            f"{param} has {size} bytes, this server takes {limits.schema_bytes}", param=param, code="too_large"
        )


def depth_beyond(value: Any, most: int) -> bool:
    """Whether ``value`` is nested deeper than ``most`` levels. Does not recurse itself."""
    level = [value]
    for _ in range(most + 1):
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
