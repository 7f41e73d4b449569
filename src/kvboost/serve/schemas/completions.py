"""What /v1/completions takes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvboost.serve.schemas.base import Text, TokenIds, at_most_lists, unsupported
from kvboost.serve.schemas.choices import Choices


class CompletionRequest(Choices):
    """POST /v1/completions."""

    prompt: Annotated[
        Text
        | TokenIds
        | Annotated[list[Text], Field(fail_fast=True)]
        | Annotated[list[TokenIds], Field(fail_fast=True)],
        at_most_lists("prompt", lambda limits: limits.max_prompts),
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: Annotated[None, unsupported("write the prompt as your model expects it to be filled in")] = None
