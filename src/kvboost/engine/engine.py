"""The public engine. Reads as one line of verbs: plan, lease, place, forward, decode, commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvboost.approx.calibrate import calibrate
from kvboost.approx.calibration import Calibration
from kvboost.approx.documents import warm_documents
from kvboost.approx.shadow import Answered
from kvboost.core.clock import StageClock
from kvboost.core.prefill import Prefiller, PrefillState
from kvboost.engine.decoding import Request
from kvboost.engine.life import EngineLife
from kvboost.engine.text_stream import PieceStream, PieceStreamer
from kvboost.errors import CapacityError, ConfigError
from kvboost.extend import Streamer
from kvboost.hf.draft import Draft
from kvboost.hf.generate import sampling_arguments, sequences_per_prompt
from kvboost.hf.prompt import Messages, Prompt
from kvboost.hf.speculation import speculates
from kvboost.offload.kv.prefill import Pages
from kvboost.store import TieredStore
from kvboost.types import GenerationMode, GenerationResult, PrefillResult, ReuseReport

_ROWS_BEHIND_PREFILL = 64  # room in a cache that is given away
_MAX_ROWS_AHEAD = 1024  # room made for a reply in advance; a longer one grows the cache as it comes
_NO_DRAFT = "it ran without the engine's draft, as pages take no tokens back"


class KVBoost(EngineLife):
    """A Transformers model that remembers what it has read.

    Thread-safe: many threads may call one engine. Settings are keyword arguments, the
    fields of :class:`kvboost.EngineConfig`. ``model`` and ``tokenizer`` stay the Transformers objects they are.
    """

    def warm(self, prompt: Prompt, *, boundaries: Sequence[int] = ()) -> int:
        """Read ``prompt`` and keep its KV. Returns the number of chunks that were new.

        Tokens behind the last chunk boundary are not kept: how they round depends on what follows them.
        """
        clock = StageClock()
        tokens = self._encoder.encode(prompt)
        reader, _ = self._reader_for(tokens, GenerationMode.CHUNK_KV_REUSE)
        if reader is None:
            return 0
        with self._model_lock, self._open(reader, tokens, boundaries=boundaries, new_rows=0, clock=clock) as reading:
            complete = reading.chunks[-1].end if reading.chunks else 0
            reader.advance(reading, to=complete)
            reader.commit(reading)
            return reading.new_chunks

    def prefetch(self, prompt: Prompt, *, boundaries: Sequence[int] = ()) -> Future[int]:
        """Bring what slower tiers have of the beginning of ``prompt`` up into memory, in the background.

        For requests that wait for their turn, with the ``boundaries`` they will have: when it comes, loading is over
        or under way. Returns at once; the future's result is how many tokens came up, and ``cancel()`` takes one back
        that has not begun. Nothing is computed, and nothing is held: memory that is full of other things lets it go.
        """
        tokens = self._encoder.encode(prompt)
        reader, _ = self._reader_for(tokens, GenerationMode.PREFIX_CACHE)
        if reader is None or not isinstance(self._store, TieredStore):
            nothing: Future[int] = Future()
            nothing.set_result(0)
            return nothing
        return self._store.prefetch(reader.usable_chunks(tokens, boundaries))

    def prefill(
        self,
        prompt: Prompt,
        *,
        mode: GenerationMode = GenerationMode.CHUNK_KV_REUSE,
        boundaries: Sequence[int] = (),
    ) -> PrefillResult:
        """Read ``prompt`` and stop before the first new token. The returned cache is the caller's own."""
        clock = StageClock()
        tokens = self._encoder.encode(prompt)
        clock.lap("encode")
        reader, reason = self._reader_for(tokens, mode)
        self._check_budget(len(tokens) + _ROWS_BEHIND_PREFILL, why="prefill() gives all of it away: use generate()")
        if reader is None:
            with self._model_lock:
                logits, cache = self._runner.read_whole(tokens)
            clock.lap("first_token")
            report = ReuseReport(0, 0, 0, len(tokens), bitwise=True, timings_ms=clock.stages(), reason=reason)
            return PrefillResult(logits, cache, report)
        move = mode is GenerationMode.CHUNK_KV_REUSE
        with (
            self._model_lock,
            reader.open(
                tokens, boundaries=boundaries, new_rows=_ROWS_BEHIND_PREFILL, clock=clock, move=move
            ) as reading,
        ):
            reader.advance_to_last_step(reading)
            logits = reader.finish(reading)
            reader.commit(reading)
            clock.lap("commit")
            return PrefillResult(logits, reading.detach(), reading.report())

    def generate(
        self,
        prompt: Prompt,
        *,
        mode: GenerationMode = GenerationMode.CHUNK_KV_REUSE,
        boundaries: Sequence[int] = (),
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        streamer: Streamer | None = None,
        **generate_kwargs: Any,
    ) -> GenerationResult:
        """Generate behind ``prompt``.

        ``boundaries`` are token positions to cut at, beside the chunker's own (ends of documents, say).
        At most ``max_new_tokens`` new tokens; without it ``max_length`` or a ``generation_config`` decides, else
        64. ``temperature=0`` is greedy. Everything else goes to ``model.generate`` and means what it means
        there: top_p, top_k, min_p, penalties, stop_strings, logits_processor, stopping_criteria,
        num_beams, ... A draft given here (``assistant_model``, ``prompt_lookup_num_tokens``) takes the place of the
        engine's own, and ``assistant_model=None`` that of none. Other ways of assisted decoding run without reuse,
        and the result says so.
        """
        clock = StageClock()
        tokens = self._encoder.encode(prompt)
        clock.lap("encode")
        request = self._request(tokens, boundaries, max_new_tokens, temperature, streamer, generate_kwargs)
        return self._generate(tokens, mode, request, clock, draft=self._draft)

    def stream(
        self,
        prompt: Prompt,
        *,
        mode: GenerationMode = GenerationMode.CHUNK_KV_REUSE,
        boundaries: Sequence[int] = (),
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        **generate_kwargs: Any,
    ) -> PieceStream:
        """Like :meth:`generate`, piece by piece. The last piece carries the result; closing the stream stops it."""
        clock = StageClock()
        tokens = self._encoder.encode(prompt)
        clock.lap("encode")
        if "streamer" in generate_kwargs:
            raise ConfigError("stream() is the streamer; leave streamer out, or use generate()")
        # Bad arguments are reported here, by the call, rather than by the first piece.
        request = self._request(tokens, boundaries, max_new_tokens, temperature, None, generate_kwargs)

        def run(emit: Any, cancelled: Any) -> GenerationResult:
            streamer = PieceStreamer(self._encoder.decode, emit)
            live = Request(request.boundaries, {**request.arguments, "streamer": streamer}, cancelled)
            return self._generate(tokens, mode, live, clock, draft=self._draft)

        return PieceStream(run)

    def chat(
        self,
        messages: Messages,
        *,
        mode: GenerationMode = GenerationMode.CHUNK_KV_REUSE,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        streamer: Streamer | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **generate_kwargs: Any,
    ) -> GenerationResult:
        """Answer a chat, through the tokenizer's template. The ends of messages are chunk boundaries."""
        clock = StageClock()
        tokens, boundaries = self._encoder.encode_chat(
            messages, min_gap=self._chunker.min_tokens, template_kwargs=template_kwargs or {}
        )
        clock.lap("encode")
        request = self._request(tokens, boundaries, max_new_tokens, temperature, streamer, generate_kwargs)
        return self._generate(tokens, mode, request, clock, draft=self._draft)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        mode: GenerationMode = GenerationMode.CHUNK_KV_REUSE,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        **generate_kwargs: Any,
    ) -> list[GenerationResult]:
        """Generate for several prompts together; a prefix they share is computed once.

        A batch runs other matrix shapes than a single request, so its numbers may round differently. The engine's
        draft is not used. One whose KV would take more than ``kv_bytes`` runs prompt by prompt.
        """
        clock = StageClock()
        if not prompts:
            return []
        encoded = [self._encoder.encode(prompt) for prompt in prompts]
        clock.lap("encode")
        longest = max(encoded, key=len)
        request = self._request(longest, (), max_new_tokens, temperature, None, generate_kwargs)
        if len(prompts) > 1 and speculates(self.model, request.arguments):
            raise ConfigError(
                "a draft proposes for one prompt at a time; leave it out of the batch (prompt_lookup_num_tokens=None "
                "if it is the model's generation_config that asks for it), or use generate()"
            )
        copies = sequences_per_prompt(self.model, request.arguments)
        if self._too_small(len(longest) + request.max_new_tokens, sequences=copies * len(prompts)) is not None:
            return [self._generate(tokens, mode, request, StageClock(), draft=None) for tokens in encoded]
        reader, reason = self._reader_for(longest, mode, request)
        if reader is None or self._parts is None:
            with self._model_lock:
                return self._decoder.batch_without_cache(encoded, request, clock, reason=reason)

        move = mode is GenerationMode.CHUNK_KV_REUSE

        def read(tokens: list[int]) -> tuple[PrefillState, Prefiller]:
            return reader.open(tokens, boundaries=(), new_rows=0, clock=clock, move=move), reader

        layout = self._parts.facts.layout
        with self._model_lock:
            return self._decoder.batch(encoded, read=read, layout=layout, request=request, clock=clock)

    def warm_documents(
        self,
        documents: Iterable[Prompt],
        *,
        head: Prompt | None = None,
        company: int = 2,
        key: Callable[[Prompt], Any] | None = None,
        progress: bool = True,
    ) -> int:
        """Read documents so that they can be moved into later prompts. Returns the number of chunks that were new.

        Each is read behind ``head`` (the beginning your prompts share, such as the system prompt) and ``company``
        other documents: its neighbours, or with ``key`` those whose keys sort next to its own. Documents whose
        text is already stored are skipped, so a run that was broken off goes on where it stopped.
        """
        if self._parts is None or self._parts.moving is None:
            reason = self._parts.reader.why_not_moved() if self._parts else self._refusal
            raise ConfigError(f"documents are read to be moved, which this engine does not do ({reason or 'as asked'})")
        ordered = documents if key is None else sorted(documents, key=key)
        return warm_documents(
            [self._encoder.encode_part(document) for document in ordered],
            head=self._encoder.encode(head) if head is not None else [],
            company=company,
            parts=self._parts,
            warm=lambda tokens, ends: self.warm(tokens, boundaries=ends),
            progress=progress,
        )

    def calibrate(
        self,
        prompts: Iterable[Prompt],
        *,
        boundaries: Sequence[Sequence[int]] | None = None,
        save_to: str | Path | None = None,
        progress: bool = True,
    ) -> Calibration:
        """Measure how many rows must be computed again, on prompts as your traffic has them, in their order.

        Each prompt is read whole and, where earlier ones left text that turns up in it, with moved chunks at
        several ratios. ``boundaries`` are each prompt's, as :meth:`generate` takes them. Give the file written to
        ``save_to`` to new engines as ``calibration``: each takes the smallest ratio shown to keep within its quality.
        """
        if self._parts is None or self._parts.moving is None:
            reason = self._parts.reader.why_not_moved() if self._parts else self._refusal
            raise ConfigError(f"nothing to calibrate: this engine moves no chunks ({reason or 'quality is exact'})")
        encoded = [self._encoder.encode(prompt) for prompt in prompts]
        ends = boundaries if boundaries is not None else [()] * len(encoded)
        if len(ends) != len(encoded):
            raise ConfigError(f"{len(ends)} lists of boundaries for {len(encoded)} prompts; give one for each")
        with self._model_lock:
            result = calibrate(encoded, boundaries=ends, parts=self._parts, progress=progress)
        if save_to is not None:
            result.save(save_to)
        return result

    def _generate(
        self, tokens: list[int], mode: GenerationMode, request: Request, clock: StageClock, *, draft: Draft | None
    ) -> GenerationResult:
        rows = len(tokens) + request.max_new_tokens
        drafted = request.arguments
        if draft is not None and mode is not GenerationMode.BASELINE:
            drafted = draft.added_to(request.arguments, model=self.model, prompt_tokens=len(tokens))
        left_out = drafted is not request.arguments and self._too_small(rows) is not None
        if not left_out:
            request = replace(request, arguments=drafted)
        reader, reason = self._reader_for(tokens, mode, request)
        copies = sequences_per_prompt(self.model, request.arguments)
        if speculates(self.model, request.arguments):
            self._check_budget(rows, why="a draft takes tokens back, which pages do not")
        if reader is None or copies > 1:
            why = "there are several sequences of it" if copies > 1 else reason or "mode BASELINE keeps all of it"
            self._check_budget(rows, sequences=copies, why=why)
        if reader is None:
            with self._model_lock:
                return self._decoder.without_cache(tokens, request, clock, reason=reason)
        new, move = request.max_new_tokens, mode is GenerationMode.CHUNK_KV_REUSE
        with (
            self._model_lock,
            self._open(reader, tokens, boundaries=request.boundaries, new_rows=new, clock=clock, move=move) as reading,
        ):
            if left_out:
                reading.reason = f"{reading.reason}; {_NO_DRAFT}"
            result = self._decoder.with_cache(reading, reader, request, keep_decoded=self.config.reuse_generated)
            if self._shadow is not None and reading.moved is not None:
                blocks, produced = reading.moved.blocks, list(result.token_ids)
                self._shadow.offer(Answered(tokens, request.boundaries, blocks, produced, reader))
        return result

    def _open(
        self,
        reader: Prefiller,
        tokens: list[int],
        *,
        boundaries: Sequence[int],
        new_rows: int,
        clock: StageClock,
        move: bool = False,
    ) -> AbstractContextManager[PrefillState]:
        """The prompt as far as it is stored: in one cache, or in pages if that would take more than ``kv_bytes``."""
        if (pages := self._too_small(len(tokens) + new_rows)) is not None:
            return pages.read(reader, tokens, boundaries=boundaries, clock=clock)
        rows = min(new_rows, _MAX_ROWS_AHEAD)
        return reader.open(tokens, boundaries=boundaries, new_rows=rows, clock=clock, move=move)

    def _too_small(self, rows: int, *, sequences: int = 1) -> Pages | None:
        """The engine's pages, if the budget does not hold so many rows without them."""
        pages = self._parts.pages if self._parts is not None else None
        return pages if pages is not None and not pages.hold(rows, sequences=sequences) else None

    def _check_budget(self, rows: int, *, sequences: int = 1, why: str) -> None:
        """For what cannot be paged: raises CapacityError if it takes more than the budget."""
        if (pages := self._too_small(rows, sequences=sequences)) is not None:
            raise pages.refuse(rows, why)

    def _request(
        self,
        tokens: list[int],
        boundaries: Sequence[int],
        max_new_tokens: int | None,
        temperature: float | None,
        streamer: Streamer | None,
        extra: dict[str, Any],
    ) -> Request:
        limit = self._parts.facts.max_positions if self._parts else None
        if limit is not None:
            room = limit - len(tokens)
            if room < 1:
                raise CapacityError(
                    f"the prompt fills all {limit} positions of this model, so there is no room for a reply; shorten it"
                )
        arguments = sampling_arguments(
            prompt_tokens=len(tokens), max_new_tokens=max_new_tokens, temperature=temperature, extra=extra
        )
        if limit is not None:
            arguments["max_new_tokens"] = min(arguments["max_new_tokens"], room)
        if streamer is not None:
            arguments["streamer"] = streamer
        return Request(boundaries, arguments, cancelled=lambda: False)
