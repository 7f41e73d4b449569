"""What every endpoint shares: the engine, the runner, the limits, and one way to start and count a generation.

Made once by the app. Invariant: a generation that was started is counted exactly once when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from kvboost.engine import KVBoost
from kvboost.errors import BusyError, CapacityError, ClosedError, ConfigError
from kvboost.failures import log_failure
from kvboost.scheduler.jobs import Job, Ticket
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve.errors import ApiError, bad_request
from kvboost.serve.generation.answers import AnswerReaders
from kvboost.serve.generation.holding import ClientPins
from kvboost.serve.generation.prompts import ChatPrompt, ChatPrompts, ReplyMemory
from kvboost.serve.generation.requests import Answer, GenerationRequest, Offer
from kvboost.serve.generation.structured import Constrain, Grammars
from kvboost.serve.generation.token_stream import Ended, TokenStream, milliseconds, seconds_per_token, token_bytes
from kvboost.serve.generation.turns import ResponseMemory
from kvboost.serve.observability.metrics import KeptStats, Metrics, RequestRecord
from kvboost.serve.observability.requests import Spaces, current_request, current_span, describe_span, stored_tenant
from kvboost.serve.schemas.base import ResponseFormat
from kvboost.serve.schemas.responses import InlineSchemaFormat
from kvboost.serve.security.auth import Caller, Keys
from kvboost.serve.security.bodies import Tokenizing
from kvboost.serve.security.fair_pool import FairPool
from kvboost.serve.security.limits import Limits, PromptLengths, Rates, Shares

_log = logging.getLogger("kvboost.serve")
_LOOK_S = 1.0  # for requests of a key that was revoked
_NEW_TOKENS = 4096  # of an answer of a model that says nothing about its positions


class Service:
    """The parts of a running server."""

    def __init__(
        self,
        engine: KVBoost,
        runner: BatchRunner,
        *,
        model_name: str,
        limits: Limits,
        keys: Keys,
        adapters: Sequence[str] = (),
    ) -> None:
        """``adapters`` are loaded, and models of their own to clients."""
        if engine.tokenizer is None:
            raise ConfigError("a server needs a tokenizer; give the engine one")
        self.engine, self.runner, self.model_name, self.limits = engine, runner, model_name, limits
        self.keys, self.adapters = keys, tuple(adapters)
        self.tokenizer = engine.tokenizer
        min_gap = engine.parts.chunker.min_tokens
        self.max_positions = getattr(engine.model.config.get_text_config(), "max_position_embeddings", None)
        limit = min((n for n in (limits.max_prompt_tokens, self.max_positions) if n is not None), default=None)
        self.lengths = PromptLengths(engine.tokenizer, limit)
        replies = ReplyMemory(limits.max_remembered_bytes // 16)
        self.chats = ChatPrompts(engine.tokenizer, min_gap=min_gap, lengths=self.lengths, replies=replies)
        self.answers = AnswerReaders(engine.tokenizer)
        self.end_token_ids = frozenset(engine.parts.matchers.end_token_ids)
        self.vocab_size = int(engine.model.get_input_embeddings().weight.shape[0])
        self.token_bytes = token_bytes(engine.tokenizer)
        self.grammars = Grammars(engine.parts.matchers)
        self.responses = ResponseMemory(limits.max_remembered_bytes)
        self.streams = Shares(limits.max_streams, refusal=f"{limits.max_streams} requests are being answered")
        self.rates = Rates(limits)
        self.under_way: Counter[str] = Counter()
        """Requests of each tenant, from their first byte to their last. For the event loop."""
        most = limits.max_waiting_prompts
        # A schema can take seconds: one thread, in which the tenants take turns.
        self.compiling = FairPool(max_waiting=most, name="kvboost-grammar")
        # Large requests are counted, parsed and tokenised in one thread, as the interpreter runs one at a time.
        self.reading = FairPool(max_waiting=most, name="kvboost-large")
        self.tokenizing = Tokenizing(max_waiting=most, large=self.reading)
        self.scoring = FairPool(max_waiting=most, name="kvboost-score")
        self.kept = KeptStats(engine)
        self.spaces = Spaces(engine)
        self.metrics = Metrics(engine, runner)
        self.pins = engine.pins
        self.client_pins = ClientPins(engine, metrics=self.metrics)
        self.draining = False
        self.started = int(time.time())

    def close(self) -> None:
        """Stop what runs in the background. The engine and the runner are others'."""
        self.client_pins.close()
        self.kept.close()
        self.reading.close()
        self.scoring.close()
        self.tokenizing.close()
        self.compiling.close()
        self.grammars.close()

    async def revoke(self, before: Collection[Caller]) -> None:
        """Release what those of ``before`` hold that have no key any more, once their running requests are done."""
        gone, idle_before = {caller.tenant for caller in before}, set[str]()
        while gone := gone - {caller.tenant for caller in self.keys.callers}:
            at_work = self.runner.load().tenants
            idle = {tenant for tenant in gone if tenant not in at_work and not self.under_way[tenant]}
            # Seen twice: a job may be submitted or released just after its client has gone.
            for tenant in idle & idle_before:
                if tenant in {caller.tenant for caller in self.keys.callers}:
                    continue  # it was given a key while others were released
                self.responses.forget(tenant)
                self.chats.replies.forget(tenant)
                self.pins.clear(tenant=tenant)
                for view in [view for view in self.engine.views()[1:] if view.config.tenant == tenant]:
                    try:
                        await asyncio.to_thread(view.close)  # it may have to write
                    except Exception as error:  # noqa: BLE001 - the other tenants are released
                        log_failure(_log, error, "closing what tenant %s held failed", stored_tenant(tenant))
                gone.discard(tenant)
                _log.info("tenant %s has no key any more: its memory was released", stored_tenant(tenant))
            idle_before = idle
            await asyncio.sleep(_LOOK_S)
        self.rates.keep({caller.key_id for caller in self.keys.callers})

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here."""
        known = (self.model_name, *self.adapters)
        if name is not None and name not in known:
            raise ApiError(
                404,
                f"this server has the model{'s' if self.adapters else ''} {', '.join(known)} only",
                param="model",
                code="model_not_found",
            )

    def encode(self, prompt: str | Sequence[int], *, param: str = "prompt") -> list[int]:
        """Token ids of a prompt, checked; ``param`` is the field it came in. For worker threads."""
        if isinstance(prompt, str):
            self.lengths.check_text(prompt, param=param, in_use=self.chats.in_use())
        try:
            with self.chats.in_use() if isinstance(prompt, str) else nullcontext():
                ids = self.engine.encode(prompt)
        except CapacityError as error:
            raise bad_request(str(error), param=param, code="context_length_exceeded") from error
        except ConfigError as error:
            raise bad_request(str(error), param=param) from error
        limit = self.limits.max_prompt_tokens
        if limit is not None and len(ids) > limit:
            raise bad_request(
                f"the prompt has {len(ids)} tokens, this server takes {limit}",
                param=param,
                code="context_length_exceeded",
            )
        return ids

    async def remember(self, prompt: ChatPrompt, ended: Ended, *, shown: Sequence[str] = ()) -> None:
        """Keep the ids of a reply, and of the parts of it that were ``shown``, to use them when the chat goes on."""
        reply = {"reply": ended.text, "ids": ended.reply_ids, "shown": shown}
        await self.tokenizing.finish(prompt.tenant, len(prompt.text), self.chats.remember, prompt, **reply)

    async def grammar(
        self,
        wanted: ResponseFormat | InlineSchemaFormat | None,
        *,
        offer: Offer | None = None,
        param: str,
        tenant: str,
    ) -> Callable[[], Constrain] | None:
        """What constrains answers: a call, or the format in the field ``param``; None for free text."""
        offer = offer or Offer()
        if offer.tools and wanted is not None and wanted.type != "text":
            raise bad_request("tools and a JSON format do not go together here", param=param)
        if offer.forced:
            return await self.compiling.run(tenant, self.grammars.compile_call, offer.forced)
        if wanted is None:
            return None
        return await self.compiling.run(tenant, self.grammars.compile, wanted, limits=self.limits, param=param)

    @asynccontextmanager
    async def generating(self, generation: GenerationRequest, *, prefix: str) -> AsyncIterator[Answer]:
        """Start the jobs of ``generation``; none is left running at the end of the block."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
        self.streams.add(generation.caller.tenant)
        started, span = time.monotonic(), current_span()
        answer: Answer | None = None
        try:
            tickets = await self._submitted(generation)
            self.rates.spend(generation.caller.key_id, sum(len(ids) for ids, _ in generation.prompts))
            decode = partial(self.chats.decode, special=generation.special)
            ends = self._ends(generation) if not generation.shows_end else generation.stop_token_ids
            stream = TokenStream(tickets, decode=decode, stops=generation.stops, end_token_ids=ends)
            model = generation.model or self.model_name
            answer = Answer(prefix + secrets.token_hex(12), int(time.time()), model, generation, stream)
            async with stream:
                yield answer
        finally:
            try:
                if answer is not None:
                    self._count(answer, seconds=time.monotonic() - started, span=span)
                    self._hold(answer)
            finally:
                self.streams.give_back(generation.caller.tenant)  # last: a server that is idle has counted everything

    async def _submitted(self, generation: GenerationRequest) -> list[Ticket]:
        """Submit the jobs of ``generation``. A client that disconnects meanwhile must not leave them running."""
        submitting = asyncio.ensure_future(asyncio.to_thread(self._submit, generation))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(
                lambda done: self._cancel(done.result()) if not done.cancelled() and done.exception() is None else None
            )
            raise

    def _submit(self, generation: GenerationRequest) -> list[Ticket]:
        tickets: list[Ticket] = []
        self.pins.listed()  # those whose time is over make room
        try:
            with ExitStack() as submitted:
                for job in self._jobs(generation):
                    tickets.append(self.runner.submit(job))
                    submitted.callback(tickets[-1].cancel)
                submitted.pop_all()  # all of them were accepted: none is cancelled
            return tickets
        except BusyError as error:
            raise ApiError(429, str(error), code="server_busy", headers={"Retry-After": "1"}) from error
        except ClosedError as error:
            _log.error("a request was refused: the runner was closed or has failed")
            raise ApiError(503, "the server takes no more requests; restart it") from error
        except ConfigError as error:
            raise bad_request(str(error)) from error
        except CapacityError as error:
            _log.info("a request was refused: %s", error)
            less = "" if generation.max_new_tokens is None else f" or lower {generation.max_param}"
            raise ApiError(
                413,
                f"{generation.prompt_param} and the answer may need more memory than this server gives to one "
                f"request; shorten {generation.prompt_param}{less}",
                param=generation.prompt_param if generation.max_new_tokens is None else generation.max_param,
                code="too_large",
            ) from error

    def _jobs(self, generation: GenerationRequest) -> Iterator[Job]:
        if generation.max_new_tokens == 0:
            return
        for ids, boundaries in generation.prompts:
            max_new_tokens = self._max_new_tokens(len(ids), generation)
            for choice in range(generation.n):
                sampling = generation.sampling
                if sampling.seed is not None and choice:
                    seed = sampling.seed + choice
                    sampling = replace(sampling, seed=seed if seed < 2**63 else seed - 2**64)
                yield Job(
                    token_ids=tuple(ids),
                    max_new_tokens=max_new_tokens,
                    may_shorten=generation.max_new_tokens is None,
                    sampling=sampling,
                    boundaries=tuple(boundaries),
                    stop_token_ids=self._ends(generation),
                    top_logprobs=generation.top_logprobs,
                    constrain=generation.grammar() if generation.grammar is not None else None,
                    tenant=generation.caller.tenant,
                    adapter=generation.model if generation.model in self.adapters else None,
                )

    def _hold(self, answer: Answer) -> None:
        """Hold what the client asked for, if its prompt was read."""
        if answer.new_tokens:
            model = answer.request.model
            self.client_pins.start(answer.request, adapter=model if model in self.adapters else None)

    def _ends(self, generation: GenerationRequest) -> frozenset[int]:
        """The tokens that end an answer and are no part of its text."""
        return generation.stop_token_ids | (frozenset() if generation.ignore_eos else self.end_token_ids)

    @staticmethod
    def _cancel(tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            ticket.cancel()

    def _max_new_tokens(self, prompt_tokens: int, generation: GenerationRequest) -> int:
        """How many new tokens the answer may have."""
        limit = self.limits.max_new_tokens or self.max_positions or _NEW_TOKENS
        wanted, left = generation.max_new_tokens, (self.max_positions or prompt_tokens + limit) - prompt_tokens
        if left < 1 or (wanted is not None and wanted > left):
            raise bad_request(
                f"this model has {self.max_positions} positions: {prompt_tokens} tokens of prompt leave {max(left, 0)} "
                f"for the answer; shorten {generation.prompt_param} or lower {generation.max_param}",
                param=generation.prompt_param if left < 1 else generation.max_param,
                code="context_length_exceeded",
            )
        if wanted is not None and wanted > limit:
            raise bad_request(
                f"this server writes at most {limit} tokens per answer; lower {generation.max_param}",
                param=generation.max_param,
            )
        return wanted or min(left, limit, generation.default_new_tokens or limit)

    def _saved_seconds(self, reuse: Mapping[str, Any]) -> float:
        """What computing the reused tokens would have taken, as far as the engine knows yet."""
        costs = self.engine.session.prefiller.costs if self.engine.session is not None else None
        if costs is None or not costs.in_seconds:
            return 0.0
        return costs.prefill_seconds(forwards=0, tokens=reuse["cached_tokens"])

    def _count(self, answer: Answer, *, seconds: float, span: Any) -> None:
        reuse = answer.reuse()
        whole = len(answer.ended) == len(answer.request.prompts) * answer.request.n
        # The first choice that failed ends the answer: the others are cancelled, or had ended before.
        failed = [ended for ended in answer.ended if ended.reason == "error"]
        reason = (
            ("refused" if failed[0].refused else "error")
            if failed
            else answer.ended[0].reason
            if whole
            else "cancelled"
        )
        queued = [ended.queued_seconds for ended in answer.ended if ended.queued_seconds is not None]
        record = RequestRecord(
            id=answer.id,
            endpoint=answer.request.endpoint,
            at=round(time.time(), 3),
            prompt=answer.prompt_tokens,
            exact=reuse["exact_tokens"],
            moved=reuse["moved_tokens"],
            recomputed=reuse["recomputed_tokens"],
            fresh=reuse["fresh_tokens"],
            new=answer.new_tokens,
            ttft_ms=reuse["ttft_ms"],
            total_ms=round(seconds * 1000, 3),
            saved_ms=round(self._saved_seconds(reuse) * 1000, 3),
            finish=reason,
            reason=reuse["reason"],
            queue_ms=milliseconds(min(queued, default=None)),
            token_ms=milliseconds(seconds_per_token(answer.ended)),
        )
        self.metrics.count(record)
        self.rates.spend(answer.request.caller.key_id, record.new)
        if span is not None:
            reports = [ended.report for ended in answer.ended if ended.report is not None]
            timings = reports[0].timings_ms if reports else {}
            describe_span(span, record, model=answer.model, bitwise=reuse["bitwise"], timings_ms=timings)
        if (request := current_request()) is not None:
            request.record = record
