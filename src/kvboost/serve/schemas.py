"""What clients may send, field by field.

Used by FastAPI to read bodies and to describe them in /openapi.json. Invariant: a field that is not written here is
refused by name, never ignored; so every field written here has an effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _no_half_surrogates(text: str) -> str:
    """JSON can write halves of surrogate pairs, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no text") from error
    return text


Text = Annotated[str, AfterValidator(_no_half_surrogates)]
TokenIds = list[Annotated[int, Field(ge=0, le=2**31)]]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Schema = dict[str, Any]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


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
    content: Text | list[TextPart] | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    """These four are empty in every answer, and clients send back what they were answered."""


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


class _Sampling(_Body):
    """What all three ways to generate take."""

    model: Text
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    prompt_cache_key: Annotated[Text, Field(max_length=256)] | None = None


class _Choices(_Sampling):
    """What the two older ways take beside it."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Text | list[Text] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        None
    )
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None


class ChatRequest(_Choices):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(_Choices):
    """POST /v1/completions."""

    prompt: Text | TokenIds | list[Text] | list[TokenIds]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class InputMessage(_Body):
    """One message of /v1/responses."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
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

    input: Text | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextSettings | None = None
    store: Literal[False] | None = None
    """Nothing is stored here, so true is refused."""


class TokenizeRequest(_Body):
    """POST /tokenize: a text or a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds


class WarmRequest(_Body):
    """POST /v1/cache/warm and /v1/cache/pin: a text, token ids or a chat to read ahead, for one tenant."""

    prompt: Text | TokenIds | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tenant: Annotated[Text, Field(max_length=64)] | None = None
