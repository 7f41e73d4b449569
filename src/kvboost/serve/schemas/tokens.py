"""What /tokenize, /detokenize and /v1/cache take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvboost.serve.schemas.base import Body, Messages, Text, TokenIds, at_most_lists

_MAX_LISTS = 1024  # more than an answer names segments


class TokenizeRequest(Body):
    """POST /tokenize: a text or a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None


class DetokenizeRequest(Body):
    """POST /detokenize: token ids, or several lists of them."""

    model: Text | None = None
    tokens: Annotated[
        TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)],
        at_most_lists("tokens", lambda limits: _MAX_LISTS),
    ]


class WarmRequest(Body):
    """POST /v1/cache/warm and /v1/cache/pin: a text, token ids or a chat to prefill, for one tenant."""

    prompt: Text | TokenIds | None = None
    messages: Messages | None = None
    tenant: Annotated[Text, Field(max_length=64)] | None = None
