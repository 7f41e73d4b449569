"""What /tokenize, /detokenize, /v1/arrange and /v1/cache take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvboost.serve.schemas.base import Body, Messages, Text, TokenIds, at_most, at_most_lists

_MAX_LISTS = 1024  # more than an answer names segments
_MAX_DOCUMENTS = 128  # of one prompt; the search for an order looks at all of them at every step


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


class ArrangeRequest(Body):
    """POST /v1/arrange: the texts of a prompt, as :meth:`kvboost.KVBoost.arrange` takes them."""

    model: Text | None = None
    documents: Annotated[
        Annotated[list[Text], Field(fail_fast=True)], at_most("documents", lambda limits: _MAX_DOCUMENTS)
    ]
    head: Text | None = None
    volatile: Text | None = None
    question: Text | None = None
    keep: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = (0, 0)
    ranks: Text | None = None


class WarmRequest(Body):
    """POST /v1/cache/warm and /v1/cache/pin: a text, token ids or a chat to prefill, for one tenant."""

    prompt: Text | TokenIds | None = None
    messages: Messages | None = None
    tenant: Annotated[Text, Field(max_length=64)] | None = None
