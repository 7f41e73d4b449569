"""What is to be generated, and a generation under way. Made by endpoints and by the service."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvboost.scheduler.jobs import Sampling
from kvboost.serve.errors import ApiError, bad_request
from kvboost.serve.generation.token_stream import Ended, Piece, TokenStream
from kvboost.serve.security.auth import Caller

_log = logging.getLogger("kvboost.serve")
_MAX_SEGMENTS = 1000  # in an answer; a prompt of thousands of scattered positions has more


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: for each prompt, ``n`` choices. Endpoints make this from their own bodies."""

    endpoint: str
    prompts: Sequence[tuple[Sequence[int], Sequence[int]]]
    """Token ids and boundaries of each."""
    caller: Caller
    max_new_tokens: int | None
    """As the client named it; None for as many as fit, within the server's limit."""
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
    top_logprobs: int | None = None
    grammar: Callable[[], Callable[[list[int], Any], None]] | None = None
    """Makes the constraint of one choice."""
    special: bool = False
    """Whether special tokens are written out: tool calls are recognised by them."""


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

    async def events(self) -> AsyncIterator[Piece | Ended]:
        """Events until all choices have ended. Raises for one that failed."""
        async for event in self.stream.events():
            if isinstance(event, Piece):
                self.seen[event.index] += len(event.tokens)
            if isinstance(event, Ended):
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
        first = [ended for ended in self.ended if ended.index % self.request.n == 0 and ended.report is not None]
        reports = [ended.report for ended in first if ended.report is not None]
        seconds = [ended.first_token_seconds for ended in self.ended if ended.first_token_seconds is not None]
        tiers: Counter[str] = Counter()
        for report in reports:
            tiers.update(report.tiers)
        return {
            "cached_tokens": sum(report.cached_tokens for report in reports),
            "exact_tokens": sum(report.exact_tokens for report in reports),
            "moved_tokens": sum(report.moved_tokens for report in reports),
            "recomputed_tokens": sum(report.recomputed_tokens for report in reports),
            "fresh_tokens": sum(report.fresh_tokens for report in reports),
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
