"""The tools of a request: those the model may call, and those of which it must call one.

Made by the endpoints that take tools. Invariant: what cannot be offered is refused by its field before anything is
computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvboost.serve.errors import bad_request
from kvboost.serve.generation.prompts import ChatPrompts
from kvboost.serve.security.limits import Limits, check_json

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class Offer:
    """What the model may call."""

    tools: Sequence[dict[str, Any]] = ()
    """As templates take them; empty if nothing is to be called."""
    forced: Mapping[str, dict[str, Any] | None] = field(default_factory=dict)
    """The functions one of which the answer has to call, with the schemas of their arguments; empty if it is free."""


def as_function(
    name: str, *, description: str | None, parameters: dict[str, Any] | None, strict: bool | None = None
) -> dict[str, Any]:
    """A tool as templates take it. Its schema is not copied: how deep that goes is checked by :func:`make_offer`."""
    given = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {field: value for field, value in given.items() if value is not None}}


def make_offer(
    tools: Sequence[dict[str, Any]],
    *,
    choice: Choice = "auto",
    named: str | None = None,
    chats: ChatPrompts,
    limits: Limits,
) -> Offer:
    """The offer of ``tools``, each of :func:`as_function`. ``named`` is the one to call, if the client chose one."""
    functions: dict[str, dict[str, Any] | None] = {
        tool["function"]["name"]: tool["function"].get("parameters") for tool in tools
    }
    # Descriptions are part of the prompt, and bounded as it is: those of a coding agent alone are 64 KiB.
    check_json([tool["function"].get("parameters") for tool in tools], limits=limits, param="tools")
    if named is not None and named not in functions:
        raise bad_request("tool_choice names a function that is not in tools", param="tool_choice")
    if choice == "required" and not functions:
        raise bad_request("tool_choice needs tools", param="tool_choice")
    if choice == "none" or not tools:
        return Offer()
    if not chats.takes_tools:
        raise bad_request("this model's chat template takes no tools", param="tools", code="unsupported_parameter")
    if named is not None:
        return Offer(tools, {named: functions[named]})
    return Offer(tools, functions if choice == "required" else {})
