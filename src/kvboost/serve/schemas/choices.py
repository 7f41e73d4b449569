"""What the two older endpoints share: several choices, stop strings, penalties."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvboost.serve.schemas.base import Body, ResponseFormat, SamplingBody, Text, at_most


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool = False


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
