"""What /v1/responses takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvboost.serve.schemas.base import (
    Body,
    JsonObjectFormat,
    Name,
    SamplingBody,
    Schema,
    Text,
    TextFormat,
    TextPart,
    at_most,
)


class InputMessage(Body):
    """One message of /v1/responses."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    id: Text | None = None
    status: Literal["completed", "incomplete"] | None = None


class InlineSchemaFormat(Body):
    """JSON that follows a schema, as /v1/responses writes it."""

    type: Literal["json_schema"]
    name: Name
    schema_: Annotated[Schema, Field(alias="schema")]
    description: Text | None = None
    strict: bool | None = None


class TextSettings(Body):
    """How the text of a response is written."""

    format: Annotated[TextFormat | JsonObjectFormat | InlineSchemaFormat, Field(discriminator="type")] | None = None


class ResponsesRequest(SamplingBody):
    """POST /v1/responses, the part of it that is text."""

    input: Annotated[
        Text | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)],
        at_most("input", lambda limits: limits.max_messages),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextSettings | None = None
    store: Literal[False] | None = None
    """Nothing is stored here, so true is refused."""
