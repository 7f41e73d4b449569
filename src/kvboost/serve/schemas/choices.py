"""What the two older endpoints share: several choices, stop strings, penalties, and what has no effect here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvboost.serve.schemas.base import (
    Body,
    Inert,
    ResponseFormat,
    SamplingBody,
    Text,
    TokenIds,
    at_most,
    unsupported,
)


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: Inert = None


_MAX_STOP_TOKENS = 128


Biases = dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Annotated[float, Field(ge=-100, le=100)]]


class Choices(SamplingBody):
    """What the two older endpoints take as well."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Annotated[
        Text | Annotated[list[Text], Field(fail_fast=True)] | None,
        at_most("stop", lambda limits: limits.max_stop_strings),
    ] = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[Biases | None, at_most("logit_bias", lambda limits: limits.max_logit_bias)] = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    """0 or -1 for all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """Over the prompt and the answer, as in vLLM. The bounds keep the scores finite."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[TokenIds | None, at_most("stop_token_ids", lambda limits: _MAX_STOP_TOKENS)] = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[
        None, unsupported("reused tokens of a prompt are not computed, so they have no log-probabilities")
    ] = None
    user: Inert = None
    metadata: Inert = None
    store: Inert = None
    service_tier: Inert = None
    safety_identifier: Inert = None
    prompt_cache_retention: Inert = None
    prompt_cache_options: Inert = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what it cost."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)
