"""Single requests: prefill the prompt up to its last step, then let Transformers run that step and decode.

Used by the engine; :mod:`kvboost.engine.batches` takes several. The time of the first token is taken when the first
token exists; committing new chunks comes after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvboost.core.costs import StageClock
from kvboost.core.session import Session
from kvboost.core.state import PrefillState
from kvboost.errors import CapacityError, UnsupportedModelError
from kvboost.hf.adapters import AS_SET, AdapterName
from kvboost.hf.generate import (
    end_token_ids,
    reads_prompt_again,
    run_generate,
    sampling_arguments,
    sequences_per_prompt,
    setting,
    stop_strings,
)
from kvboost.hf.probe import ModelFacts
from kvboost.hf.prompt import PromptEncoder
from kvboost.hf.runner import ModelRunner
from kvboost.scheduler.jobs import OfferCheck
from kvboost.types import GenerationMode, GenerationResult, PrefillResult, ReuseReport

_CAPACITY_AFTER_PREFILL = 64  # tokens, in a cache that is given away
_MAX_TOKENS_AHEAD = 1024  # capacity for a reply made in advance; a longer one grows the cache as it comes
_OPTIONAL = ("max_new_tokens", "temperature", "streamer")  # None means: not given
_CALLER_OWNS_CACHE = "prefill() gives all of it away: use generate()"


@dataclass(frozen=True)
class Request:
    """What to generate, and how."""

    tokens: list[int]
    boundaries: Sequence[int]
    arguments: dict[str, Any]
    cancelled: Callable[[], bool] = lambda: False
    adapter: AdapterName = AS_SET

    @property
    def max_new_tokens(self) -> int:
        """Capacity needed after the prompt."""
        return int(self.arguments["max_new_tokens"])

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and its answer, at most."""
        return len(self.tokens) + self.max_new_tokens


def warm(session: Session, tokens: list[int], *, boundaries: Sequence[int], clock: StageClock) -> int:
    """Prefill a prompt and store it, on a grid its whole steps. Returns how many chunks were new."""
    prefiller = session.prefiller
    with open_prefill(session, tokens, boundaries=boundaries, clock=clock) as state:
        end = state.rule.resume(len(tokens))
        if state.hits.tokens < end:
            prefiller.advance(state, to=end)
        prefiller.commit(state)
        return state.new_chunks


def prefill_only(
    session: Session, tokens: list[int], *, boundaries: Sequence[int], clock: StageClock, approx: bool
) -> PrefillResult:
    """Prefill a prompt and hand its cache to the caller."""
    prefiller, extra = session.prefiller, _CAPACITY_AFTER_PREFILL
    session.budget.check(len(tokens) + extra, why=_CALLER_OWNS_CACHE)
    with prefiller.open(tokens, boundaries=boundaries, new_tokens=extra, clock=clock, approx=approx) as state:
        prefiller.advance_to_last_step(state)
        logits = prefiller.finish(state)
        prefiller.commit(state)
        clock.lap("commit")
        return PrefillResult(logits, state.detach(), state.report())


def _no_reuse(tokens: list[int], clock: StageClock, reason: str | None) -> ReuseReport:
    return ReuseReport(0, 0, 0, len(tokens), bitwise=True, timings_ms=clock.stages(), reason=reason)


def open_prefill(
    session: Session,
    tokens: list[int],
    *,
    boundaries: Sequence[int],
    clock: StageClock,
    new_tokens: int = 0,
    approx: bool = False,
) -> AbstractContextManager[PrefillState]:
    """Open a prefill with the stored part of the prompt: in one cache, or in pages above ``kv_bytes``."""
    budget, prefiller = session.budget, session.prefiller
    if not budget.fits(len(tokens) + new_tokens):
        if budget.paging is None:
            budget.check(len(tokens) + new_tokens, why=f"this model's KV cannot be paged ({budget.unpaged})")
        else:
            return budget.paging.open(prefiller, tokens, boundaries=boundaries, clock=clock)
    ahead = min(new_tokens, _MAX_TOKENS_AHEAD)
    return prefiller.open(tokens, boundaries=boundaries, new_tokens=ahead, clock=clock, approx=approx)


def _nothing() -> None:
    pass


class FirstToken:
    """Called after every token: records the time of the first one, then runs what had to wait for it.

    ``exists`` runs as soon as there is a token, ``then`` once the caller has it too. Transformers hands a token to a
    streamer before it looks at the stopping criteria, and from 5.23 on after that.
    """

    def __init__(
        self,
        clock: StageClock,
        *,
        cancelled: Callable[[], bool],
        exists: Callable[[], Any] = _nothing,
        then: Callable[[], Any] = _nothing,
    ) -> None:
        self.clock = clock
        self._cancelled, self._exists, self._then = cancelled, exists, then
        self._awaited = 1
        self.ttft_ms: float | None = None
        self.was_cancelled = False

    def __call__(self) -> bool:
        if self.ttft_ms is None:
            self.clock.lap("first_token")
            self.ttft_ms = self.clock.elapsed_ms
            self._exists()
            self._arrived()
        self.was_cancelled = self.was_cancelled or self._cancelled()
        return self.was_cancelled

    def over(self, streamer: Any) -> Any:
        """The streamer to give to Transformers instead of this one."""
        self._awaited += 1
        return _Handing(streamer, self._arrived)

    def _arrived(self) -> None:
        self._awaited -= 1
        if self._awaited == 0:
            self._then()
            self.clock.lap("commit")


class _Handing:
    """A streamer that passes everything on, and calls back once the first new token is handed over."""

    def __init__(self, streamer: Any, handed_over: Callable[[], None]) -> None:
        self._streamer, self._handed_over = streamer, handed_over
        self._count = 0

    def put(self, value: Any) -> None:
        """The prompt comes first, then every new token."""
        self._streamer.put(value)
        self._count += 1
        if self._count == 2:
            self._handed_over()

    def end(self) -> None:
        self._streamer.end()


class Generator:
    """Generates with one model."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        encoder: PromptEncoder,
        tokenizer: Any,
        offer_check: OfferCheck,
        facts: ModelFacts | None,
        refusal: str | None,
    ) -> None:
        """``offer_check`` is called with every answer; ``refusal`` is why a model without ``facts`` reuses nothing."""
        self._model, self._runner, self._refusal = runner.model, runner, refusal
        self._max_positions = facts.max_positions if facts is not None else None
        self._offer_check = offer_check
        self._encoder, self._tokenizer = encoder, tokenizer

    def request(
        self,
        tokens: list[int],
        options: dict[str, Any],
        *,
        boundaries: Sequence[int] = (),
        adapter: AdapterName = AS_SET,
    ) -> Request:
        """A request with checked arguments. Raises CapacityError where there is no position left for a reply."""
        limit = self._max_positions
        if limit is not None and limit <= len(tokens):
            raise CapacityError(
                f"the prompt fills all {limit} positions of this model, so none is left for a reply; shorten it"
            )
        given = {name: value for name, value in options.items() if value is not None or name not in _OPTIONAL}
        arguments = sampling_arguments(prompt_tokens=len(tokens), options=given)
        if limit is not None:
            arguments["max_new_tokens"] = min(arguments["max_new_tokens"], limit - len(tokens))
        return Request(tokens, boundaries, arguments, adapter=adapter)

    def run(
        self, session: Session | None, request: Request, mode: GenerationMode, clock: StageClock
    ) -> GenerationResult:
        """Generate after one prompt, with as much reuse as ``mode``, the model and the arguments allow."""
        usable, reason = self.usable(session, request.tokens, mode, request)
        if usable is not None:
            return self._reuse(usable, request, clock, approx=mode is GenerationMode.CHUNK_KV_REUSE)
        if session is not None:
            self._check_plain(session, request, reason)
        return self._plain(request, clock, reason=reason)

    def usable(
        self, session: Session | None, tokens: list[int], mode: GenerationMode, request: Request | None = None
    ) -> tuple[Session | None, str | None]:
        """The session if a prompt can use it, else None and the reason."""
        if mode is GenerationMode.BASELINE:
            return None, None
        if session is None:
            return None, self._refusal
        reason = session.refusal(len(tokens))
        if reason is None and request is not None:
            reason = reads_prompt_again(self._model, request.arguments)
        return (session, None) if reason is None else (None, reason)

    def _check_plain(self, session: Session, request: Request, reason: str | None) -> None:
        """Raise CapacityError for a request without reuse whose KV exceeds ``kv_bytes``."""
        copies = self.copies(request.arguments)
        why = "there are several sequences of it" if copies > 1 else reason or "mode BASELINE keeps all of it"
        session.budget.check(request.total_tokens, sequences=copies, why=why)

    def _plain(self, request: Request, clock: StageClock, *, reason: str | None) -> GenerationResult:
        """Plain Transformers."""
        watch = FirstToken(clock, cancelled=request.cancelled)

        def report() -> ReuseReport:
            return _no_reuse(request.tokens, clock, reason)

        return self._answer(request.tokens, None, request.arguments, watch, report)

    def prefill_plain(
        self, session: Session | None, tokens: list[int], clock: StageClock, *, reason: str | None
    ) -> PrefillResult:
        """Plain Transformers, up to the first new token."""
        if session is not None:
            session.budget.check(len(tokens) + _CAPACITY_AFTER_PREFILL, why=_CALLER_OWNS_CACHE)
        logits, cache = self._runner.prefill_plain(tokens)
        clock.lap("first_token")
        return PrefillResult(logits, cache, _no_reuse(tokens, clock, reason))

    def _reuse(self, session: Session, request: Request, clock: StageClock, *, approx: bool) -> GenerationResult:
        """Prefill with the stored KV, decode, and store what is new."""
        total, copies, budget = request.total_tokens, self.copies(request.arguments), session.budget
        if copies > 1:
            budget.check(total, sequences=copies, why="there are several sequences of it")
        with open_prefill(
            session,
            request.tokens,
            boundaries=request.boundaries,
            clock=clock,
            new_tokens=request.max_new_tokens,
            approx=approx,
        ) as state:
            result = self._decode(session, state, request, copies)
            self._offer_check(session.prefiller, state.prompt, state.take_checked(), result.token_ids, request.adapter)
        return result

    def _decode(self, session: Session, state: PrefillState, request: Request, copies: int) -> GenerationResult:
        prefiller = session.prefiller
        alone = copies == 1
        if alone:
            prefiller.advance_to_last_step(state, cancelled=request.cancelled)
        else:  # the last token is left to a forward of all sequences
            prefiller.advance(state, to=max(state.last_step, len(state.tokens) - 1), cancelled=request.cancelled)
            prefiller.commit(state)  # before the cache is multiplied
            state.cache.batch_repeat_interleave(copies)

        def first_token_exists() -> None:
            if alone:
                prefiller.last_step_ran(state)

        watch = FirstToken(
            state.clock,
            cancelled=request.cancelled,
            exists=first_token_exists,
            then=partial(prefiller.commit, state),
        )
        left = len(state.tokens) - state.num_computed
        with self._runner.first_forward(state.cache, left) if alone else nullcontext():
            result = self._answer(state.tokens, state.cache, request.arguments, watch, state.report)
        if getattr(result.raw, "past_key_values", None) is state.cache:
            if state.paged:  # its pages are freed with the request
                result = replace(result, raw=replace(result.raw, past_key_values=None))
            else:
                state.detach()  # the caller owns it now
        if session.keeps_decoded and alone:
            prefiller.commit_decoded(state, result.token_ids)
        return result

    def copies(self, arguments: dict[str, Any]) -> int:
        """How many sequences are made of one prompt."""
        return sequences_per_prompt(self._model, arguments)

    def _answer(
        self,
        prompt: list[int],
        cache: Any,
        arguments: dict[str, Any],
        watch: FirstToken,
        report: Callable[[], ReuseReport],
    ) -> GenerationResult:
        """Let Transformers decode. ``cache`` holds the prompt up to its last step; None if nothing is cached."""
        if arguments.get("streamer") is not None:
            arguments = {**arguments, "streamer": watch.over(arguments["streamer"])}
        ids = torch.tensor([prompt], device=self._runner.device)
        decoded = run_generate(
            self._model,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            cache=cache,
            arguments=arguments,
            after_each_token=watch,
            tokenizer=self._tokenizer,
        )
        watch.clock.lap("decode")
        # The best of several beams may have ended before the last step.
        has_beams = (setting(self._model, arguments, "num_beams") or 1) > 1
        if cache is not None and not has_beams and cache.get_seq_length() >= decoded.sequences.shape[1]:
            raise UnsupportedModelError(
                "Transformers computed the prompt again on top of the given cache, so this answer is wrong; "
                "call with mode=GenerationMode.BASELINE for these arguments"
            )
        new, finish_reason = self._ended(decoded.sequences[0, len(prompt) :].tolist(), arguments, watch.was_cancelled)
        return GenerationResult(
            output_text=self._encoder.decode(new),
            token_ids=tuple(new),
            prompt_token_ids=tuple(prompt),
            finish_reason=finish_reason,
            ttft_ms=watch.ttft_ms if watch.ttft_ms is not None else watch.clock.elapsed_ms,
            total_ms=watch.clock.elapsed_ms,
            reuse=report(),
            raw=decoded.raw,
        )

    def _ended(self, new: list[int], arguments: dict[str, Any], cancelled: bool) -> tuple[list[int], str]:
        """The tokens of a sequence without the padding of shorter ones beside it, and why it ended."""
        ends = end_token_ids(self._model, arguments)
        for index, token in enumerate(new):
            if token in ends:
                return new[: index + 1], "stop"
        if cancelled:
            return new, "cancelled"
        if len(new) < int(arguments["max_new_tokens"]):
            return new, "stop"
        text = self._encoder.decode(new) if (stops := stop_strings(arguments)) else ""
        return new, "stop" if any(stop in text for stop in stops) else "length"
