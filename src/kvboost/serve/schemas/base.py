"""What clients may send, field by field: the parts that endpoints share.

Used by FastAPI to read bodies and to describe them in /openapi.json. Invariant: a field that is not written here is
refused by name, never ignored; so every field written here has an effect. Only the first error is reported: the first
entry of a list, the first unknown field. A body of a million wrong entries would otherwise be a million errors, made
on the event loop while all others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvboost.serve.security.bodies import limits_now
from kvboost.serve.security.limits import Limits, check_count


def _no_half_surrogates(text: str) -> str:
    """JSON can write halves of surrogate pairs, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no text") from error
    return text


def at_most(param: str, limit: Callable[[Limits], int]) -> BeforeValidator:
    """Refuse a list or an object that is too long before its entries are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict):
            check_count(len(value), limit(limits_now()), param=param)
        return value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_no_half_surrogates)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(fail_fast=True)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Schema = dict[str, Any]


class Body(BaseModel):
    """A JSON object. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, value: Any) -> Any:
        """Of more fields than there are, one is unknown: that many are enough to say so."""
        enough = len(cls.model_fields) + 1
        return dict(islice(value.items(), enough)) if isinstance(value, dict) and len(value) > enough else value


class CacheControl(Body):
    """Marks the end of a part as a place to cut, as Anthropic's clients write it."""

    type: Literal["ephemeral"]


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    cache_control: CacheControl | None = None


class CalledFunction(Body):
    """The function an assistant called earlier."""

    name: Name
    arguments: Text
    """JSON, as it was answered."""


class ToolCall(Body):
    """A call an assistant made earlier."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    """These four are empty in every answer, and clients send back what they were answered."""


Messages = Annotated[
    list[Message], Field(min_length=1, fail_fast=True), at_most("messages", lambda limits: limits.max_messages)
]


class Function(Body):
    """A function the model may call."""

    name: Name
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool the model may use: functions only."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """A function by its name."""

    name: Name


class NamedChoice(Body):
    """The one function to call."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Body):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema with its name."""

    name: Name
    schema_: Annotated[Schema, Field(alias="schema")]
    description: Text | None = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


_MIN_SHARE = 1e-9
"""Of the probability: the likeliest token alone, which is what 0 asks for."""


class SamplingBody(Body):
    """What all three endpoints that generate take."""

    model: Text
    stream: Annotated[bool, BeforeValidator(lambda value: value is not None and value)] = False
    """Null is what clients write who have not decided."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1), AfterValidator(lambda share: max(share, _MIN_SHARE))] | None = None
    prompt_cache_key: Annotated[Text, Field(max_length=256)] | None = None
