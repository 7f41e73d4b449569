"""What /v1/responses takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from kvboost.serve.schemas.base import (
    NO_EFFECT,
    Body,
    CalledFunction,
    Inert,
    JsonObjectFormat,
    Listed,
    Name,
    NamedSchema,
    SamplingBody,
    Schema,
    Text,
    TextFormat,
    TextOr,
    TextPart,
    at_most,
    tagged,
    text_only,
)

_Empty = Annotated[list[Any], Field(max_length=0)]
_TEXT_ONLY = text_only(("input_image", "input_file", "input_audio"))


class ItemPart(TextPart):
    """A piece of a message. What is empty in every answer may come back."""

    annotations: _Empty | None = None
    logprobs: _Empty | None = None


Parts = TextOr[Annotated[ItemPart, _TEXT_ONLY]]


class Item(Body):
    """What every item may bring back of the answer that it was in."""

    id: Text | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(Item):
    """One message of /v1/responses."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(Item, CalledFunction):
    """A call an assistant made earlier."""

    type: Literal["function_call"]
    call_id: Text


class FunctionCallOutput(Item):
    """What a function answered."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Parts


class ReasoningText(Body):
    """A thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(Item):
    """What an assistant thought earlier."""

    type: Literal["reasoning"]
    summary: Listed[ReasoningText]
    content: Listed[ReasoningText] | None = None
    encrypted_content: Text | None = None
    """Of another server, which only that one can read: it is left out."""


_TAGS = {
    "message": "InputMessage",
    "function_call": "FunctionCall",
    "function_call_output": "FunctionCallOutput",
    "reasoning": "ReasoningItem",
}


InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[FunctionCall, Tag("FunctionCall")]
    | Annotated[FunctionCallOutput, Tag("FunctionCallOutput")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")],
    tagged(_TAGS, called="an item", default="message"),
]


class InlineSchemaFormat(NamedSchema):
    """JSON that follows a schema, as /v1/responses writes it."""

    type: Literal["json_schema"]


class TextSettings(Body):
    """How the text of a response is written."""

    format: Annotated[TextFormat | JsonObjectFormat | InlineSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, NO_EFFECT] = None


class FunctionTool(Body):
    """A function the model may call. The tools that OpenAI's own servers run are refused."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class NamedTool(Body):
    """The one function to call."""

    type: Literal["function"]
    name: Name


class Reasoning(Body):
    """How much to reason."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Annotated[Literal["auto", "concise", "detailed"] | None, NO_EFFECT] = None
    """Reasoning is given as it is."""


class ResponsesStreamOptions(Body):
    """How to stream."""

    include_obfuscation: Annotated[bool | None, NO_EFFECT] = None


class ResponsesRequest(SamplingBody):
    """POST /v1/responses, the part of it that is text."""

    input: Annotated[
        Annotated[Text, Tag("str")]
        | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("list[item]")],
        Discriminator(lambda value: "str" if isinstance(value, str) else "list[item]"),
        at_most(lambda limits: limits.max_messages),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextSettings | None = None
    tools: Annotated[Listed[FunctionTool] | None, at_most(lambda limits: limits.max_tools)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[Text, Field(max_length=64)] | None = None
    store: bool | None = None
    """Whether ``previous_response_id`` may name the response; true unless it is false."""
    truncation: Literal["disabled"] | None = None
    """Nothing is ever left out of a conversation, so ``auto`` is refused."""
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[Annotated[dict[str, Text], Field(max_length=16)] | None, NO_EFFECT] = None
    user: Annotated[Text | None, NO_EFFECT] = None
    max_tool_calls: Annotated[int | None, NO_EFFECT] = None
    """These three come back in the response."""
    safety_identifier: Inert = None
    service_tier: Inert = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]] | None, NO_EFFECT] = None
    stream_options: ResponsesStreamOptions | None = None
