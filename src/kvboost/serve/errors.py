"""Refusals as clients read them: OpenAI's, ``{"error": {"message", "type", "param", "code"}}``, or Anthropic's.

Raised by every endpoint and turned into a response by the app. Invariant: a message names what to change
and never repeats what a client sent beyond the name of a field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 503: "overloaded_error"}
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")


class ApiError(Exception):
    """A request that is refused, with the status and the words of the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self, path: str = "") -> dict[str, Any]:
        """The answer's body, as the clients of this path read it."""
        if speaks_anthropic(path):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def speaks_anthropic(path: str) -> bool:
    """Whether the clients of this path are Anthropic's."""
    return path.endswith(_ANTHROPIC_PATHS)


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def too_many(what: str) -> ApiError:
    """A 429 that may be tried again in a moment. ``what`` says what there is too much of."""
    message = f"{what}, this server's limit; try again in a moment"
    return ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})


UNKNOWN_FIELD = "unknown_field"
"""The type of the error of a field that is in no schema; its context has the ``field`` and which may be ``meant``."""
_NO_OBJECT = "the body is not a JSON object; send one, with the header Content-Type: application/json"
_WHOLE, _NUMBER, _TRUTH, _OBJECT = "give a whole number", "give a number", "give true or false", "give an object"
_TO_DO = {
    "missing": "this field is required; give it",
    "none_required": "leave it out",
    "string_type": "give a text",
    "string_too_short": "give {min_length} or more characters",
    "string_too_long": "give {max_length} or fewer characters",
    "string_pattern_mismatch": "give a text that fits {pattern}",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": "give a smaller number",
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": _NUMBER,
    "bool_type": _TRUTH,
    "bool_parsing": _TRUTH,
    "list_type": "give a list",
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "literal_error": "give {expected}",
    "union_tag_invalid": "give {discriminator} as one of {expected_tags}",
    "union_tag_not_found": "give an object with {discriminator}",
    "greater_than_equal": "give {ge} or more",
    "less_than_equal": "give {le} or less",
    "too_short": "give {min_length} or more entries",
    "too_long": "give {max_length} or fewer entries",
}
"""What to do about each kind of error that pydantic itself finds; those of our own checks say it themselves."""
_AS_JSON = {"True": "true", "False": "false", "None": "null"}


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What pydantic found, as one 400 that names the first field in the way: an unknown one before all others."""
    first = next((error for error in errors if error["type"] == UNKNOWN_FIELD), errors[0])
    context = first.get("ctx") or {}
    if first["type"] == "json_invalid":  # FastAPI's own: where it stopped is the last part of the location
        return bad_request(
            f"the body is not valid JSON: {context.get('error')} at character {first['loc'][-1]}; send a JSON object",
            code="invalid_json",
        )
    path = [str(part) for part in first["loc"] if part != "body" and not _is_branch(part)]
    if first["type"] == UNKNOWN_FIELD:
        param = ".".join([*path, context["field"]])
        hint = f"did you mean {context['meant']}?" if context["meant"] else "leave it out"
        return bad_request(
            f"the field {param} is not supported by this server; {hint}", param=param, code="unsupported_parameter"
        )
    if not path:
        return bad_request(_NO_OBJECT, code="invalid_value")
    param = ".".join(path)
    return bad_request(f"{param}: {_to_do(first, context)}", param=param, code="invalid_value")


def _to_do(error: Mapping[str, Any], context: Mapping[str, Any]) -> str:
    is_text = context.get("field_type") == "Value"  # pydantic's word for a text that a check of ours has seen
    known = _TO_DO.get(f"string_{error['type']}" if is_text else error["type"])
    if known is None:
        return str(error["msg"]).removeprefix("Value error, ")
    return known.format_map({name: _AS_JSON.get(str(value), value) for name, value in context.items()})


def _is_branch(part: Any) -> bool:
    """Whether this part of a location is pydantic's name for a branch of a union, which no client has written."""
    return isinstance(part, str) and (part[:1].isupper() or "[" in part or part in ("str", "int", "float", "bool"))
