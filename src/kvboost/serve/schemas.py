"""What clients may send, field by field.

Used by FastAPI to read bodies and to describe them in /openapi.json. Invariant: a field that is not written here is
refused by name, never ignored; so every field written here has an effect. Only the first error is reported: the first
entry of a list, the first unknown field. A body of a million wrong entries would otherwise be a million errors, made
on the event loop while all others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from kvboost.serve.security.bodies import limits_now
from kvboost.serve.security.limits import Limits, check_count


def _no_half_surrogates(text: str) -> str:
    """JSON can write halves of surrogate pairs, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no text") from error
    return text


def _at_most(param: str, limit: Callable[[Limits], int]) -> BeforeValidator:
    """Refuse a list or an object that is too long before its entries are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict):
            check_count(len(value), limit(limits_now()), param=param)
        return value

    return BeforeValidator(check)


def _few_prompts(value: Any) -> Any:
    """Token ids are one prompt, however many; anything else in a list is a prompt each."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        check_count(len(value), limits_now().max_prompts, param="prompt")
    return value


Text = Annotated[str, AfterValidator(_no_half_surrogates)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(fail_fast=True)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Schema = dict[str, Any]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, value: Any) -> Any:
        """Of more fields than there are, one is unknown: that many are enough to say so."""
        enough = len(cls.model_fields) + 1
        return dict(islice(value.items(), enough)) if isinstance(value, dict) and len(value) > enough else value


class CacheControl(_Body):
    """Marks the end of a part as a place to cut, as Anthropic's clients write it."""

    type: Literal["ephemeral"]


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    cache_control: CacheControl | None = None


class CalledFunction(_Body):
    """The function an assistant called earlier."""

    name: Name
    arguments: Text
    """JSON, as it was answered."""


class ToolCall(_Body):
    """A call an assistant made earlier."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Body):
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
    list[Message], Field(min_length=1, fail_fast=True), _at_most("messages", lambda limits: limits.max_messages)
]


class Function(_Body):
    """A function the model may call."""

    name: Name
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(_Body):
    """A tool the model may use: functions only."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Body):
    """A function by its name."""

    name: Name


class NamedChoice(_Body):
    """The one function to call."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(_Body):
    """How to stream."""

    include_usage: bool = False


class TextFormat(_Body):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(_Body):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(_Body):
    """A JSON schema with its name."""

    name: Name
    schema_: Annotated[Schema, Field(alias="schema")]
    description: Text | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


_MIN_SHARE = 1e-9
"""Of the probability: the likeliest token alone, which is what 0 asks for."""


class _Sampling(_Body):
    """What all three endpoints that generate take."""

    model: Text
    stream: Annotated[bool, BeforeValidator(lambda value: value is not None and value)] = False
    """Null is what clients write who have not decided."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1), AfterValidator(lambda share: max(share, _MIN_SHARE))] | None = None
    prompt_cache_key: Annotated[Text, Field(max_length=256)] | None = None


Biases = dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Annotated[float, Field(ge=-100, le=100)]]


class _Choices(_Sampling):
    """What the two older endpoints take as well."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Annotated[
        Text | Annotated[list[Text], Field(fail_fast=True)] | None,
        _at_most("stop", lambda limits: limits.max_stop_strings),
    ] = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[Biases | None, _at_most("logit_bias", lambda limits: limits.max_logit_bias)] = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None


class ChatRequest(_Choices):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[
        Annotated[list[Tool], Field(fail_fast=True)] | None, _at_most("tools", lambda limits: limits.max_tools)
    ] = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(_Choices):
    """POST /v1/completions."""

    prompt: Annotated[
        Text
        | TokenIds
        | Annotated[list[Text], Field(fail_fast=True)]
        | Annotated[list[TokenIds], Field(fail_fast=True)],
        BeforeValidator(_few_prompts),
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class InputMessage(_Body):
    """One message of /v1/responses."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    id: Text | None = None
    status: Literal["completed", "incomplete"] | None = None


class InlineSchemaFormat(_Body):
    """JSON that follows a schema, as /v1/responses writes it."""

    type: Literal["json_schema"]
    name: Name
    schema_: Annotated[Schema, Field(alias="schema")]
    description: Text | None = None
    strict: bool | None = None


class TextSettings(_Body):
    """How the text of a response is written."""

    format: Annotated[TextFormat | JsonObjectFormat | InlineSchemaFormat, Field(discriminator="type")] | None = None


class ResponsesRequest(_Sampling):
    """POST /v1/responses, the part of it that is text."""

    input: Annotated[
        Text | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)],
        _at_most("input", lambda limits: limits.max_messages),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextSettings | None = None
    store: Literal[False] | None = None
    """Nothing is stored here, so true is refused."""


class TokenizeRequest(_Body):
    """POST /tokenize: a text or a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds


class WarmRequest(_Body):
    """POST /v1/cache/warm and /v1/cache/pin: a text, token ids or a chat to prefill, for one tenant."""

    prompt: Text | TokenIds | None = None
    messages: Messages | None = None
    tenant: Annotated[Text, Field(max_length=64)] | None = None
