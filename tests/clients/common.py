"""What the adapters of all clients share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

MODEL = "model"
MAX_TOKENS = 24
FORCED_TOKENS = 96
"""Enough for a whole call or object."""


class Paint(BaseModel):
    """Paint the house."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green", "blue"]
    coats: Literal[1, 2, 3]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "coats": {"enum": [1, 2, 3]}},
    "required": ["colour", "coats"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Said:
    """One message: who and what."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    text: str
    cached: int | None
    """Tokens of the prompt from the cache, as far as the client shows them."""


class Client(Protocol):
    """One client, by what every client can do."""

    def chat(self, said: list[Said]) -> Answer: ...

    def stream(self, said: list[Said]) -> list[str]:
        """The pieces of text."""
        ...

    def call(self, said: list[Said]) -> tuple[str, dict[str, Any]]:
        """The name and the arguments of the call that the model was made to write."""
        ...

    def parse(self, said: list[Said]) -> Paint:
        """An object out of a structured answer."""
        ...


def as_dicts(said: list[Said]) -> list[dict[str, str]]:
    return [{"role": one.role, "content": one.text} for one in said]
