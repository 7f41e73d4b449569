"""What clients may send, field by field: the parts that endpoints share.

Used by FastAPI to read bodies and to describe them in /openapi.json. Invariant: a field that is not written here is
refused by name, never ignored; every field written here has an effect or is :data:`Inert`, and those that a client
sent are named to it. Only the first error is reported: the first entry of a list, the first unknown field. A body of a
million wrong entries would otherwise be a million errors, made on the event loop while all others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvboost.serve.errors import UNKNOWN_FIELD, bad_request
from kvboost.serve.security.bodies import limits_now
from kvboost.serve.security.limits import Limits, check_count


def _no_half_surrogates(text: str) -> str:
    """JSON can write halves of surrogate pairs, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no text") from error
    return text


def at_most(limit: Callable[[Limits], int], *, ids_are_one: bool = False) -> BeforeValidator:
    """Refuse a list or an object that is too long before its entries are looked at.

    ``ids_are_one``: a list of token ids is one entry, however many they are.
    """

    def check(value: Any, info: ValidationInfo) -> Any:
        several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
        if several if ids_are_one else isinstance(value, list | dict):
            check_count(len(value), limit(limits_now()), param=str(info.field_name))
        return value

    return BeforeValidator(check)


def unsupported(why: str) -> BeforeValidator:
    """Refuse a known field that would change the answer, with what to do; null is what clients send by default."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            message = f"{info.field_name} is not supported by this server; {why}"
            raise bad_request(message, param=info.field_name, code="unsupported_parameter")
        return value

    return BeforeValidator(check)


_INERT = "has no effect on the answer here"
NO_EFFECT: Any = Field(description=_INERT)
"""Marks a field whose value is checked and has no effect here."""
Inert = Annotated[Any, NO_EFFECT]
"""A field that clients of other servers send and that has no effect here, whatever it says."""
Text = Annotated[str, AfterValidator(_no_half_surrogates)]
_T = TypeVar("_T")
Listed = Annotated[list[_T], Field(fail_fast=True)]
"""A list of which the first wrong entry is reported."""
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(fail_fast=True)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Schema = dict[str, Any]


class Body(BaseModel):
    """A JSON object. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)
    _known: ClassVar[frozenset[str]]
    _inert: ClassVar[tuple[str, ...]]

    @classmethod
    def __pydantic_init_subclass__(cls, **settings: Any) -> None:
        """Called by pydantic once the fields of a subclass are complete."""
        cls._known = frozenset(field.alias or name for name, field in cls.model_fields.items())
        cls._inert = tuple(name for name, field in cls.model_fields.items() if field.description == _INERT)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, value: Any) -> Any:
        """The first unknown field, and which one it may have been meant to be."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls._known:
                    raise _unknown(str(name), cls._known)
        return value

    def ignored(self) -> list[str]:
        """The fields that the client sent and that have no effect here, also those of objects in fields."""
        found = [name for name in self._inert if getattr(self, name) is not None]
        for name, value in vars(self).items():
            if isinstance(value, Body) and name not in found:
                found += [f"{name}.{inner}" for inner in value.ignored()]
        return found


_MAX_NAME = 64  # characters of a field's name; a longer one is nobody's typing error
_SAME = (
    ("max_completion_tokens", "max_tokens", "max_output_tokens"),
    ("messages", "input", "prompt"),
    ("stop", "stop_sequences"),
    ("instructions", "system"),
)
"""What the endpoints call differently."""


def _unknown(name: str, known: frozenset[str]) -> PydanticCustomError:
    meant = [other for names in _SAME if name in names for other in names if other in known]
    if not meant and len(name) <= _MAX_NAME:
        meant = get_close_matches(name, known, n=1, cutoff=0.75)
    shown = name[:_MAX_NAME].encode(errors="replace").decode()
    return PydanticCustomError(
        UNKNOWN_FIELD, "this field is not known", {"field": shown, "meant": meant[0] if meant else ""}
    )


class CacheControl(Body):
    """Marks the end of a part as a place to cut, as Anthropic's clients write it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    """How long what lies before it is held; if left out, 5 minutes."""
    scope: Annotated[Annotated[str, Field(max_length=64)] | None, NO_EFFECT] = None
    """Each key has a cache of its own."""

    @property
    def seconds(self) -> int:
        """The same in seconds."""
        return 3600 if self.ttl == "1h" else 300


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    cache_control: CacheControl | None = None


TextOr = Annotated[
    Annotated[Text, Tag("str")] | Annotated[Listed[_T], Tag("list[part]")],
    Discriminator(lambda content: "str" if isinstance(content, str) else "list[part]"),
]
"""A text, or a list of parts. The tags are what refusals leave out of a field's name: no client has written them."""

_EXPECTED = 'expected {"type": "text", "text": "..."}'
_IMAGES = {"image_url", "image", "input_image", "video_url", "video"}
_OTHER_PARTS = _IMAGES | {"input_audio", "audio", "file", "input_file", "document"}


def tagged(classes: Mapping[str, str], *, called: str, default: str | None = None) -> Discriminator:
    """Tells the branches of a union apart by ``type``, whose values are given with the names of their classes.

    ``called`` is what a refusal calls one of them, ``default`` the type of an object that names none.
    """

    def class_of(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else None
        return classes.get(kind) if isinstance(kind, str) else None

    message = f"give {called} of type {' or '.join(classes)}"
    return Discriminator(class_of, custom_error_type="tag", custom_error_message=message)


def text_only(others: Collection[str]) -> BeforeValidator:
    """Refuse by its name a part whose type is one of ``others``."""

    def check(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in others:
            raise PydanticCustomError("text_only", "this server takes text only; leave out {kind}", {"kind": kind})
        return part

    return BeforeValidator(check)


def _is_part(value: Any) -> Any:
    if isinstance(value, TextPart):
        return value
    if not isinstance(value, dict):
        raise PydanticCustomError("no_part", "a part of content is an object; " + _EXPECTED)
    if value.get("type") not in ("text", "input_text", "output_text"):
        raise PydanticCustomError("no_part", "a part of content has the type text; " + _EXPECTED)
    return value


Part = Annotated[TextPart, BeforeValidator(_is_part), text_only(_OTHER_PARTS)]
MessageContent = Annotated[
    Annotated[Text, Tag("Text")] | Annotated[list[Part], Field(fail_fast=True), Tag("Parts")],
    Discriminator(
        lambda value: "Text" if isinstance(value, str) else "Parts" if isinstance(value, list) else None,
        custom_error_type="no_content",
        custom_error_message="expected a text or a list of parts; " + _EXPECTED,
    ),
]
"""Of a message: a text, or parts that are texts. Anything else is refused by its name."""


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
    index: Annotated[int, Field(ge=0)] | None = None
    """What clients have left over from a stream."""


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent | None = None
    reasoning_content: Text | None = None
    """What an assistant wrote to itself, as it was answered. Templates decide what becomes of it."""
    name: Name | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: Text | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    """These four are empty in every answer, and clients send back what they were answered."""


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(lambda limits: limits.max_messages)]


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
