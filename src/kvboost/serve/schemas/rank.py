"""What clients may send to /v1/score and /v1/rerank, as vLLM, Jina and Cohere have it.

Used by these endpoints. Invariant: as in :mod:`kvboost.serve.schemas.base`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvboost.serve.schemas.base import Body, Inert, Listed, Text, at_most

_MAX_DOCUMENTS = 1024
_Texts = Annotated[Listed[Text], at_most(lambda limits: _MAX_DOCUMENTS)]


class RankBody(Body):
    """What both take."""

    model: Text | None = None
    instruction: Text | None = None
    template: Text | None = None
    """A prompt with {query}, {document} and {instruction} in it. If left out, the model's chat template is used."""
    yes: Annotated[Text, Field(min_length=1)] = "yes"
    no: Annotated[Text, Field(min_length=1)] = "no"
    """The answers that are compared."""
    user: Inert = None


class ScoreRequest(RankBody):
    """POST /v1/score. The first two fields are what vLLM called the other two before."""

    text_1: Text | _Texts | None = None
    text_2: Text | _Texts | None = None
    queries: Text | _Texts | None = None
    documents: Text | _Texts | None = None


class RerankRequest(RankBody):
    """POST /v1/rerank."""

    query: Text
    documents: Annotated[list[Text], Field(min_length=1, fail_fast=True), at_most(lambda limits: _MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """How many are returned; all of them for 0, as in vLLM."""
    return_documents: bool | None = None
    """Whether results have their texts; yes if left out, as in vLLM and Jina."""
