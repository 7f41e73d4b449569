"""What /v1/messages and /v1/messages/count_tokens take: Anthropic's shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, Tag, model_validator

from kvboost.serve.schemas.base import (
    NO_EFFECT,
    Body,
    CacheControl,
    Inert,
    Listed,
    SamplingBody,
    Schema,
    Text,
    TextOr,
    at_most,
    tagged,
    text_only,
)
from kvboost.serve.security.bodies import limits_now

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
_TEXT_ONLY = text_only(("image", "document", "search_result"))


class TextBlock(Body):
    """A piece of text."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None
    """Empty in every answer, and clients send back what they were answered."""


class ThinkingBlock(Body):
    """What an assistant thought earlier."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class RedactedThinkingBlock(Body):
    """Thoughts of another server, which only that one can read: they are left out."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(Body):
    """A call an assistant made earlier."""

    type: Literal["tool_use"]
    id: Text
    name: ToolName
    input: dict[str, Any]
    cache_control: Annotated[CacheControl | None, NO_EFFECT] = None
    """Only the template knows where a call ends in the text."""
    caller: Inert = None

    def ignored(self) -> list[str]:
        """As of any body. The mark is named with its block: that of other blocks has an effect."""
        return [name.replace("cache_control", "tool_use.cache_control") for name in super().ignored()]


OnlyText = TextOr[Annotated[TextBlock, _TEXT_ONLY]]


class ToolResultBlock(Body):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: OnlyText | None = None
    is_error: Annotated[bool | None, NO_EFFECT] = None
    """The content says it."""
    cache_control: CacheControl | None = None


_TAGS = {
    "text": "TextBlock",
    "tool_use": "ToolUseBlock",
    "tool_result": "ToolResultBlock",
    "thinking": "ThinkingBlock",
    "redacted_thinking": "RedactedThinkingBlock",
}


Block = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[RedactedThinkingBlock, Tag("RedactedThinkingBlock")],
    tagged(_TAGS, called="a block"),
    _TEXT_ONLY,
]


class InputMessage(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    """A system message in the middle is what newer coding agents write."""
    content: TextOr[Block]

    @model_validator(mode="after")
    def _blocks_of_its_role(self) -> Self:
        for block in self.content if isinstance(self.content, list) else ():
            of_user = isinstance(block, ToolResultBlock) and self.role == "user"
            of_assistant = not isinstance(block, ToolResultBlock) and self.role == "assistant"
            if not (isinstance(block, TextBlock) or of_user or of_assistant):
                raise ValueError(f"a message of {self.role} holds no block of type {block.type}")
        return self


class CustomTool(Body):
    """A function the model may call. The tools that Anthropic's own servers run are refused."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: Schema
    strict: Annotated[bool | None, NO_EFFECT] = None
    cache_control: Annotated[CacheControl | None, NO_EFFECT] = None
    eager_input_streaming: Annotated[bool | None, NO_EFFECT] = None


class ToolChoice(Body):
    """Whether and what to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named_or_not(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("give name with type tool, and only there")
        return self


class Thinking(Body):
    """Whether the model thinks first."""

    type: Literal["disabled", "enabled", "adaptive"]
    budget_tokens: Annotated[Annotated[int, Field(ge=1)] | None, NO_EFFECT] = None
    display: Annotated[Literal["summarized", "omitted"] | None, NO_EFFECT] = None


class SchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(Body):
    """How the answer is written."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens: a conversation."""

    model: Text
    messages: Annotated[
        list[InputMessage],
        Field(min_length=1, fail_fast=True),
        at_most(lambda limits: limits.max_messages),
    ]
    system: OnlyText | None = None
    tools: Annotated[Listed[CustomTool] | None, at_most(lambda limits: limits.max_tools)] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None
    """What ``output_config.format`` was called first."""
    cache_control: Annotated[CacheControl | None, NO_EFFECT] = None
    """Everything is cached here, so the request as a whole needs no mark."""
    context_management: Inert = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None

    def ignored(self) -> list[str]:
        """The fields that the client sent and that have no effect here; each once, however many entries have it."""
        found = [f"tools.{name}" for tool in self.tools or () for name in tool.ignored()]
        for message in self.messages:
            for block in message.content if isinstance(message.content, list) else ():
                found += [f"messages.content.{name}" for name in block.ignored()]
        for block in self.system if isinstance(self.system, list) else ():
            found += [f"system.{name}" for name in block.ignored()]
        return list(dict.fromkeys([*super().ignored(), *found]))


def _short(stop: str) -> str:
    most = limits_now().max_stop_characters
    if not 0 < len(stop) <= most:
        raise ValueError(f"a stop sequence has 1 to {most} characters")
    return stop


class MessagesRequest(CountTokensRequest, SamplingBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    """At most: an answer ends earlier where the model's positions or the server's limit end."""
    stop_sequences: Annotated[
        Listed[Annotated[Text, AfterValidator(_short)]] | None,
        at_most(lambda limits: limits.max_stop_strings),
    ] = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    metadata: Inert = None
    service_tier: Inert = None
    container: Inert = None
    inference_geo: Inert = None
    diagnostics: Inert = None
    speed: Inert = None
    user_profile_id: Inert = None
    workspace_id: Inert = None
