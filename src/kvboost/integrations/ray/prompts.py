"""How a replica reads, cuts and names the prompt of an HTTP request: token ids, their cuts, the root of their keys.

Used by :mod:`kvboost.integrations.ray.router`, in the front's process: needs neither torch nor ray. A replica sends its
:class:`Facts` once, as plain values. Invariant: what cannot be read here is no error; the replica says what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import ValidationError
from starlette.types import Scope

from kvboost.core.keys import fingerprint_root
from kvboost.errors import ConfigError
from kvboost.serve.errors import ApiError
from kvboost.serve.generation.prompts import ChatPrompts, effort_variables
from kvboost.serve.generation.turns import as_function, to_turn
from kvboost.serve.schemas.chat import ChatRequest, CompletionRequest
from kvboost.serve.security.auth import Keys
from kvboost.serve.security.limits import Limits, check_json
from kvboost.types import Fingerprint


@dataclass(frozen=True)
class Facts:
    """What of a replica does not change: how it cuts prompts and names their KV."""

    fingerprint: Fingerprint
    """Of the engine's own tenant."""
    chunking: str
    chunk_tokens: int
    approximate: bool
    """Whether it uses text behind other text."""
    shares: bool
    """Whether what it computes goes to a tier that all replicas read."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """As it was sent."""
        return cls(**{**given, "fingerprint": Fingerprint(**given["fingerprint"])})

    def root(self, tenant: str) -> bytes:
        """What the keys of a tenant's prompts are derived from; callers without a tenant have the engine's own."""
        return fingerprint_root(replace(self.fingerprint, tenant=tenant or self.fingerprint.tenant))


@dataclass(frozen=True)
class AskedPrompt:
    """What a request wants to have prefilled."""

    tenant: str
    token_ids: list[int]
    boundaries: list[int]


class PromptReader:
    """Reads requests for one model. Thread-safe."""

    def __init__(self, tokenizer: Any, *, min_gap: int, model_name: str, keys: Keys) -> None:
        """``min_gap`` is the shortest chunk that a message's end may cut off."""
        self._tokenizer, self._model_name, self._keys = tokenizer, model_name, keys
        self._limits = Limits()
        self._chats = ChatPrompts(tokenizer, min_gap=min_gap)

    def read(self, scope: Scope, body: bytes) -> AskedPrompt | None:
        """The prompt; of several the first. None if there is none, or if it is not known how the model reads it."""
        readers = {"/v1/chat/completions": self._chat, "/v1/completions": self._completion}
        reader = readers.get(scope["path"])
        headers = dict(scope["headers"])
        caller = self._keys.caller(headers.get(b"authorization", b"Bearer " + headers.get(b"x-api-key", b"")))
        if reader is None or caller is None:
            return None
        try:
            found = reader(body, caller.tenant)
        except (ApiError, ConfigError, ValidationError, UnicodeError):
            return None
        return AskedPrompt(caller.tenant, *found) if found is not None else None

    def _chat(self, body: bytes, tenant: str) -> tuple[list[int], list[int]] | None:
        asked = ChatRequest.model_validate_json(body)
        if asked.model != self._model_name:
            return None  # an adapter: its keys are others
        given = asked.chat_template_kwargs or {}
        # As the replica does: what it refuses is not rendered here, a template of the client's own least of all.
        check_json(given, limits=self._limits, param="chat_template_kwargs")
        self._chats.check_kwargs(given, param="chat_template_kwargs")
        functions = [tool.function for tool in asked.tools or [] if asked.tool_choice != "none"]
        tools = [as_function(function) for function in functions]
        prompt = self._chats.encode(
            [to_turn(message) for message in asked.messages],
            tenant=tenant,
            cache_key=asked.prompt_cache_key or "",
            tools=tools,
            template_kwargs={**effort_variables(asked.reasoning_effort), **given},
        )
        return prompt.token_ids, prompt.boundaries

    def _completion(self, body: bytes, tenant: str) -> tuple[list[int], list[int]] | None:
        asked = CompletionRequest.model_validate_json(body)
        if asked.model != self._model_name:
            return None
        first: Any = asked.prompt
        if isinstance(first, list) and first and not isinstance(first[0], int):
            first = first[0]
        if isinstance(first, str):
            with self._chats.in_use():
                first = [int(i) for i in self._tokenizer(first)["input_ids"]]
        return first, []
