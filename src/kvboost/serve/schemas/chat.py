"""What /v1/chat/completions takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvboost.serve.schemas.base import NO_EFFECT, Inert, Messages, NamedChoice, Tool, at_most, unsupported
from kvboost.serve.schemas.choices import Choices

_TextOnly = Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=1)]


class ChatRequest(Choices):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[
        Annotated[list[Tool], Field(fail_fast=True)] | None, at_most("tools", lambda limits: limits.max_tools)
    ] = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Given to the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More for the chat template."""
    modalities: Annotated[_TextOnly | None, NO_EFFECT] = None
    verbosity: Inert = None
    prediction: Inert = None
    functions: Annotated[None, unsupported("give tools")] = None
    function_call: Annotated[None, unsupported("give tool_choice")] = None
    audio: Annotated[None, unsupported("it takes and writes text only; leave it out")] = None
    web_search_options: Annotated[None, unsupported("it does not search; leave it out")] = None
    moderation: Annotated[None, unsupported("it does not moderate; leave it out")] = None
