"""What an answer is made of: reasoning, text and tool calls.

Made by the readers of answers, written by each endpoint in its own shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reasoning:
    """More of what the model wrote to itself before its answer."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class Call:
    """A whole call of a tool, as the model wrote it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class CallOpened:
    """A call is known: its number in the answer, its id and its function. The arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of a call, as JSON."""

    index: int
    text: str


Found = Reasoning | Content | Call
Part = Reasoning | Content | CallOpened | CallArguments
