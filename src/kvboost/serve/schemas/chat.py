"""What OpenAI's two older endpoints take, and those that read a prompt without answering it.

Used by these endpoints, and by the router of a fleet. Invariant: as in :mod:`kvboost.serve.schemas.base`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvboost.serve.schemas.base import (
    NO_EFFECT,
    Body,
    Inert,
    Listed,
    Messages,
    NamedChoice,
    ResponseFormat,
    SamplingBody,
    Text,
    TokenIds,
    Tool,
    at_most,
    unsupported,
)

_MAX_STOP_TOKENS = 128
_MAX_LISTS = 1024  # more than an answer names segments
_MAX_DOCUMENTS = 128  # of one prompt; the search for an order looks at all of them at every step
_MAX_RANKED = 1024
_Documents = Annotated[Listed[Text], at_most(lambda limits: _MAX_RANKED)]
_Biases = dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Annotated[float, Field(ge=-100, le=100)]]
_TextOnly = Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=1)]


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: Inert = None


class Choices(SamplingBody):
    """What the two older endpoints take as well."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Annotated[
        Text | Listed[Text] | None,
        at_most(lambda limits: limits.max_stop_strings),
    ] = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[_Biases | None, at_most(lambda limits: limits.max_logit_bias)] = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    """0 or -1 for all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """Over the prompt and the answer, as in vLLM. The bounds keep the scores finite."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[TokenIds | None, at_most(lambda limits: _MAX_STOP_TOKENS)] = None
    ignore_eos: bool | None = None
    user: Inert = None
    metadata: Inert = None
    store: Inert = None
    service_tier: Inert = None
    safety_identifier: Inert = None
    prompt_cache_options: Inert = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what it cost."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(Choices):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """In memory is where a prompt is found again anyhow; clients write it both ways."""
    prompt_logprobs: Annotated[None, unsupported("give the ids that /tokenize makes of it to /v1/completions")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[Listed[Tool] | None, at_most(lambda limits: limits.max_tools)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Given to the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More for the chat template."""
    modalities: Annotated[_TextOnly | None, NO_EFFECT] = None
    verbosity: Inert = None
    prediction: Inert = None
    functions: Annotated[None, unsupported("give tools")] = None
    function_call: Annotated[None, unsupported("give tool_choice")] = None
    audio: Annotated[None, unsupported("it takes and writes text only; leave it out")] = None
    web_search_options: Annotated[None, unsupported("it does not search; leave it out")] = None
    moderation: Annotated[None, unsupported("it does not moderate; leave it out")] = None


class CompletionRequest(Choices):
    """POST /v1/completions."""

    prompt: Annotated[
        Text | TokenIds | Listed[Text] | Listed[TokenIds],
        at_most(lambda limits: limits.max_prompts, ids_are_one=True),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 for the log-probabilities of a prompt alone."""
    logprobs: Annotated[int, Field(ge=0, le=5, strict=True)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    """As in vLLM: of each token of the prompt, and of so many of the likeliest ones in its place."""
    echo: bool | None = None
    prompt_cache_retention: Inert = None
    best_of: Annotated[None, unsupported("ask for n choices with logprobs and take the best")] = None
    suffix: Annotated[None, unsupported("write the prompt as your model expects it to be filled in")] = None


class TokenizeRequest(Body):
    """POST /tokenize: a text or a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None


class DetokenizeRequest(Body):
    """POST /detokenize: token ids, or several lists of them."""

    model: Text | None = None
    tokens: Annotated[
        TokenIds | Listed[TokenIds],
        at_most(lambda limits: _MAX_LISTS, ids_are_one=True),
    ]


class ArrangeRequest(Body):
    """POST /v1/arrange: the texts of a prompt, as :meth:`kvboost.KVBoost.arrange` takes them."""

    model: Text | None = None
    documents: Annotated[Listed[Text], at_most(lambda limits: _MAX_DOCUMENTS)]
    head: Text | None = None
    volatile: Text | None = None
    question: Text | None = None
    keep: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = (0, 0)
    ranks: Text | None = None


class RankBody(Body):
    """What a score and a ranking both take."""

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

    text_1: Text | _Documents | None = None
    text_2: Text | _Documents | None = None
    queries: Text | _Documents | None = None
    documents: Text | _Documents | None = None


class RerankRequest(RankBody):
    """POST /v1/rerank."""

    query: Text
    documents: Annotated[list[Text], Field(min_length=1, fail_fast=True), at_most(lambda limits: _MAX_RANKED)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """How many are returned; all of them for 0, as in vLLM."""
    return_documents: bool | None = None
    """Whether results have their texts; yes if left out, as in vLLM and Jina."""


class WarmRequest(Body):
    """POST /v1/cache/warm and /v1/cache/pin: a text, token ids or a chat to prefill, for one tenant."""

    prompt: Text | TokenIds | None = None
    messages: Messages | None = None
    tenant: Annotated[Text, Field(max_length=64)] | None = None
