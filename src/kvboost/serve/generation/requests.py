"""What is to be generated, from the fields of a request, and a generation under way.

Made by the endpoints and by the service. Invariant: what cannot be generated or offered is refused by its field before
anything is computed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvboost.hf.sampling import Sampling
from kvboost.serve.errors import ApiError, bad_request
from kvboost.serve.generation.prompts import ChatPrompts, Hold
from kvboost.serve.generation.token_stream import Ended, Piece, TokenStream
from kvboost.serve.schemas.base import SamplingBody
from kvboost.serve.schemas.chat import Choices
from kvboost.serve.security.auth import Caller
from kvboost.serve.security.limits import Limits, check_json
from kvboost.types import ReuseReport

_log = logging.getLogger("kvboost.serve")
_MAX_SEGMENTS = 1000  # in an answer; a prompt of thousands of scattered positions has more
_KINDS = ("cached", "exact", "moved", "recomputed", "fresh")  # of a prompt's tokens; the first are the next two

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: for each prompt, ``n`` choices. Endpoints make this from their own bodies."""

    endpoint: str
    prompts: Sequence[tuple[Sequence[int], Sequence[int]]]
    """Token ids and boundaries of each."""
    caller: Caller
    max_new_tokens: int | None
    """As the client named it; None for as many as fit, within the server's limit; 0 if prompts are only scored."""
    sampling: Sampling
    model: str | None
    """As the client named it, checked; None for the server's own."""
    default_new_tokens: int | None = None
    """No more than these if the client named no number."""
    max_param: str = "max_tokens"
    """The field that names the number, as this endpoint's clients know it."""
    prompt_param: str = "prompt"
    """The field that holds the prompt."""
    n: int = 1
    stops: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, beside the model's own."""
    ignore_eos: bool = False
    """Whether the model's own end the answer no more."""
    shows_end: bool = False
    """Whether the model's own are among the tokens of the answer."""
    top_logprobs: int | None = None
    grammar: Callable[[], Callable[[list[int], Any], None]] | None = None
    """Makes the constraint of one choice."""
    special: bool = False
    """Whether special tokens are written out: tool calls are recognised by them."""
    holds: Sequence[Hold] = ()
    """What the client wants to find again, of the only prompt."""


@dataclass
class Answer:
    """A generation under way."""

    id: str
    created: int
    model: str
    request: GenerationRequest
    stream: TokenStream
    ended: list[Ended] = field(default_factory=list)
    seen: Counter[int] = field(default_factory=Counter)
    """Tokens of each choice so far: a client that goes away has had them."""
    read: list[ReuseReport] = field(default_factory=list)
    """Of each choice whose prompt was read whole for its log-probabilities."""

    async def events(self) -> AsyncIterator[Piece | Ended]:
        """Events until all choices have ended. Raises for one that failed."""
        for index, report in enumerate(self.read if self.request.max_new_tokens == 0 else ()):
            self.ended.append(Ended(reason="length", report=report, index=index))
            yield self.ended[-1]
        async for event in self.stream.events():
            if isinstance(event, Piece):
                self.seen[event.index] += len(event.tokens)
            if isinstance(event, Ended):
                if self.read:  # then its job's hit saved nothing
                    event = replace(event, report=self.read[event.index])
                self.seen[event.index] = len(event.token_ids)
                self.ended.append(event)
                if event.reason == "error" and event.refused:
                    raise bad_request(event.error or "this request cannot be answered", code="refused")
                if event.reason == "error":
                    _log.error("answer=%s failed in its job", self.id)  # whose log line says where
                    _log.debug("answer=%s: %s", self.id, event.error)
                    raise ApiError(500, "the model could not answer this request; the server's log says why")
                if event.reason == "cancelled":
                    raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
            yield event

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every object of OpenAI's begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; choices of one prompt count it once."""
        return sum(len(ids) for ids, _ in self.request.prompts)

    @property
    def new_tokens(self) -> int:
        """New tokens of all choices so far."""
        return self.seen.total()

    def reuse(self) -> dict[str, Any]:
        """Where the prompts' KV came from: of the first choice of each, as the others reuse its KV."""
        first = [ended.report for ended in self.ended if ended.index % self.request.n == 0]
        reports = [report for report in first if report is not None]
        seconds = [ended.first_token_seconds for ended in self.ended if ended.first_token_seconds is not None]
        tiers: Counter[str] = Counter()
        for report in reports:
            tiers.update(report.tiers)
        return {
            **{f"{kind}_tokens": sum(getattr(report, f"{kind}_tokens") for report in reports) for kind in _KINDS},
            "tiers": dict(tiers),
            "segments": reports[0].segments[:_MAX_SEGMENTS] if reports else (),
            "reason": next((report.reason for report in reports if report.reason is not None), None),
            "bitwise": all(report.bitwise for report in reports),
            "ttft_ms": round(min(seconds) * 1000, 3) if seconds else None,
        }

    def usage(self) -> dict[str, Any]:
        """The ``usage`` object of an answer."""
        reuse = self.reuse()
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": reuse["cached_tokens"]},
            "kvboost": reuse,
        }


def drawn_by(body: SamplingBody, **more: Any) -> Sampling:
    """How to draw tokens: what all endpoints take, and ``more``. The defaults are OpenAI's."""
    temperature, top_p = (1.0 if given is None else given for given in (body.temperature, body.top_p))
    return Sampling(temperature=temperature, top_p=top_p, **more)


def sampling_of(
    body: Choices, *, limits: Limits, vocab_size: int, max_new_tokens: int | None
) -> tuple[Sampling, list[str]]:
    """How to draw tokens, and the stop strings."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
    if any(not stop or len(stop) > limits.max_stop_characters for stop in stops):
        raise bad_request(f"a stop string has 1 to {limits.max_stop_characters} characters", param="stop")
    bias: Mapping[int, float] = {int(token): value for token, value in (body.logit_bias or {}).items()}
    for param, tokens in (("logit_bias", bias), ("stop_token_ids", body.stop_token_ids or ())):
        if any(token >= vocab_size for token in tokens):
            raise bad_request(f"{param} names tokens beyond this model's {vocab_size}", param=param)
    if (body.n or 1) > limits.max_choices:
        raise bad_request(f"this server makes at most {limits.max_choices} choices", param="n")
    _check_least(body, max_new_tokens)
    sampling = drawn_by(
        body,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=bias,
        min_new_tokens=body.min_tokens or 0,
    )
    return sampling, stops


def _check_least(body: Choices, max_new_tokens: int | None) -> None:
    """Refuse a least length that cannot be reached."""
    if not body.min_tokens:
        return
    if max_new_tokens is not None and body.min_tokens > max_new_tokens:
        raise bad_request("min_tokens is more than the answer may have", param="min_tokens")
    if body.response_format is not None and body.response_format.type != "text":
        raise bad_request("min_tokens and a JSON format do not go together", param="min_tokens")


@dataclass(frozen=True)
class Offer:
    """What the model may call."""

    tools: Sequence[dict[str, Any]] = ()
    """As templates take them; empty if nothing is to be called."""
    forced: Mapping[str, dict[str, Any] | None] = field(default_factory=dict)
    """The functions one of which the answer has to call, with the schemas of their arguments; empty if it is free."""


def make_offer(
    tools: Sequence[dict[str, Any]],
    *,
    choice: Choice = "auto",
    named: str | None = None,
    chats: ChatPrompts,
    limits: Limits,
) -> Offer:
    """The offer of ``tools``, each made by ``as_function``. ``named`` is the one to call, if the client chose one."""
    functions: dict[str, dict[str, Any] | None] = {
        tool["function"]["name"]: tool["function"].get("parameters") for tool in tools
    }
    # Descriptions are part of the prompt, and bounded as it is: those of a coding agent alone are 64 KiB.
    check_json([tool["function"].get("parameters") for tool in tools], limits=limits, param="tools")
    if named is not None and named not in functions:
        raise bad_request("tool_choice names a function that is not in tools", param="tool_choice")
    if choice == "required" and not functions:
        raise bad_request("tool_choice needs tools", param="tool_choice")
    if choice == "none" or not tools:
        return Offer()
    if not chats.takes_tools:
        raise bad_request("this model's chat template takes no tools", param="tools", code="unsupported_parameter")
    if named is not None:
        return Offer(tools, {named: functions[named]})
    return Offer(tools, functions if choice == "required" else {})
