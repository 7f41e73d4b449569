"""What /v1/completions takes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kvboost.serve.schemas.base import Text, TokenIds, unsupported
from kvboost.serve.schemas.choices import Choices
from kvboost.serve.security.bodies import limits_now
from kvboost.serve.security.limits import check_count


def _few_prompts(value: Any) -> Any:
    """Token ids are one prompt, however many; anything else in a list is a prompt each."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        check_count(len(value), limits_now().max_prompts, param="prompt")
    return value


class CompletionRequest(Choices):
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
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: Annotated[None, unsupported("write the prompt as your model expects it to be filled in")] = None
