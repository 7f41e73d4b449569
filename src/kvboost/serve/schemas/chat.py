"""What /v1/chat/completions takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvboost.serve.schemas.base import Messages, NamedChoice, Tool, at_most
from kvboost.serve.schemas.choices import Choices


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
