"""The public engine. Reads as one line of verbs: plan, lease, place, forward, decode, commit."""

from __future__ import annotations

import dataclasses
import difflib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvboost.config import EngineConfig, parse_bytes
from kvboost.engine.assembly import Assembly, assemble, check_settings
from kvboost.engine.calibration import calibrate
from kvboost.engine.clock import StageClock
from kvboost.engine.decoding import Decoder, Request
from kvboost.engine.documents import warm_documents
from kvboost.engine.guard import GuardedStore
from kvboost.engine.prompt import Messages, Prompt, PromptEncoder
from kvboost.engine.reader import PromptReader, Reading
from kvboost.engine.shadow import Answered, ShadowChecks, answers_differ
from kvboost.engine.stats import cache_stats, describe
from kvboost.engine.streaming import PieceStream, PieceStreamer
from kvboost.engine.tenants import TenantViews, purge_tenant
from kvboost.engine.verify import warm_equals_cold
from kvboost.engine.workspace import WorkspacePool
from kvboost.errors import CapacityError, ConfigError, UnsupportedModelError
from kvboost.extend import ChunkStore, Streamer
from kvboost.model import (
    ModelRunner,
    load_model,
    reads_prompt_again,
    sampling_arguments,
)
from kvboost.plan import make_chunker
from kvboost.repair import Calibration
from kvboost.store import MemoryStore, TieredStore
from kvboost.types import (
    CacheStats,
    GenerationMode,
    GenerationResult,
    HotChunk,
    PrefillResult,
    ReuseReport,
)

_MOST_ROWS_AHEAD = 1024  # room made for a reply in advance; a longer one grows the cache as it comes


class KVBoost:
    """A Transformers model that remembers what it has read.

    Thread-safe: many threads may call one engine. Settings are keyword arguments, the
    fields of :class:`kvboost.EngineConfig`. ``model`` and ``tokenizer`` stay the Transformers objects they are.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, store: ChunkStore | None = None, **settings: Any) -> None:
        """Wrap a loaded model. ``tokenizer`` may be None if prompts are always token ids."""
        try:
            self.config = EngineConfig(**settings)
        except TypeError as error:
            raise ConfigError(f"unknown setting: {error}") from error
        self.model = model
        self.tokenizer = tokenizer
        if model.training:
            raise ConfigError("the model is in training mode, where dropout changes every answer; call model.eval()")
        self._runner = ModelRunner(model)
        self._chunker = make_chunker(self.config.chunking, size=self.config.chunk_size)
        self._closed = False
        self._tenants = TenantViews()
        self._viewed: KVBoost | None = None  # the engine this one is a tenant's view of
        self._parts: Assembly | None = None
        self._refusal: str | None = None
        try:
            self._parts = assemble(self._runner, config=self.config, chunker=self._chunker, store=store)
        except UnsupportedModelError as error:
            if self.config.strict:
                raise
            warnings.warn(f"running without reuse: {error}", stacklevel=2)
            self._refusal = str(error)
        self._owns_store = store is None
        self._store: ChunkStore = self._parts.store if self._parts else store or MemoryStore(0)
        # Length-dependent RoPE keeps its frequencies on the module: requests of different lengths must take turns.
        takes_turns = self._parts is not None and self._parts.facts.exact_limit is not None
        self._turn: AbstractContextManager[Any] = threading.RLock() if takes_turns else nullcontext()
        self._shadow: ShadowChecks | None = None
        moving = self._parts.moving if self._parts else None
        if self.config.checked_share > 0.0 and moving is not None:
            check = weakref.WeakMethod(self._answers_differ)  # the thread must not keep the engine alive
            self._shadow = ShadowChecks(
                lambda request: ask(request) if (ask := check()) is not None else None,
                share=self.config.checked_share,
                guard=moving.guard,
            )
            weakref.finalize(self, self._shadow.stop)
        self._encoder = PromptEncoder(
            tokenizer,
            max_tokens=self._parts.facts.max_positions if self._parts else None,
            vocab_size=model.get_input_embeddings().weight.shape[0],
        )
        self._decoder = Decoder(model, encoder=self._encoder, tokenizer=tokenizer, device=self._runner.device)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        dtype: Any = "auto",
        device: str | None = None,
        store: ChunkStore | None = None,
        weight_budget: int | str | None = None,
        weight_dir: str | Path | None = None,
        **settings_and_model_kwargs: Any,
    ) -> KVBoost:
        """Load a model and its tokenizer, and wrap them.

        Args:
            name_or_path: A folder or a hub name, as Transformers takes it.
            dtype: Passed to Transformers; ``"auto"`` takes the checkpoint's own.
            device: Where to put the model; the accelerator if there is one, else the CPU.
            store: Keep chunks here instead of in a memory store of the engine's own.
            weight_budget: Keep at most this many bytes of weights in memory, such as ``"6GB"``: the layers that do
                not fit are read from disk in every step, while others compute. The answers stay the same to the bit.
            weight_dir: Where the layers' files for that are made, once, as large as the model; beside the
                checkpoint if left out.
            **settings_and_model_kwargs: The engine's settings, by the names of :class:`kvboost.EngineConfig`, which
                says what each does; everything else goes to ``AutoModelForCausalLM.from_pretrained``.
        """
        names = {field.name for field in dataclasses.fields(EngineConfig)}
        settings = {name: value for name, value in settings_and_model_kwargs.items() if name in names}
        model_kwargs = {name: value for name, value in settings_and_model_kwargs.items() if name not in names}
        for name in model_kwargs:
            if near := difflib.get_close_matches(name, names, n=1, cutoff=0.8):
                raise ConfigError(f"{name} is not a setting; did you mean {near[0]}?")
        check_settings(EngineConfig(**settings))  # a bad one should not cost the user a model load
        model, tokenizer = load_model(
            name_or_path,
            dtype=dtype,
            device=device,
            model_kwargs=model_kwargs,
            weight_budget=parse_bytes(weight_budget, name="weight_budget") if weight_budget is not None else None,
            weight_dir=weight_dir,
        )
        return cls(model, tokenizer, store=store, **settings)

    def for_tenant(self, tenant: str) -> KVBoost:
        """This engine for another tenant, who finds nothing of what the others read, in no tier.

        It shares the model, the memory's budget and all connections, takes a few milliseconds to make and is the same
        object for every call. It may be closed by itself and is closed with this engine.
        """
        return self._tenants.get(self._viewed or self, tenant)

    def views(self) -> list[KVBoost]:
        """This engine and what :meth:`for_tenant` made of it that is still open."""
        whole = self._viewed or self
        return [whole, *whole._tenants.all()]

    def purge_tenant(self, tenant: str) -> None:
        """Remove everything that was kept for a tenant, of whatever model, from every tier. Let its requests end first.

        Raises StoreError if a tier could not be asked. What other processes hold in memory, they purge themselves.
        """
        purge_tenant(self._viewed or self, tenant)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids that ``prompt`` stands for, checked as every call checks them."""
        return self._encoder.encode(prompt)

    def join(self, parts: Sequence[Prompt]) -> tuple[list[int], list[int]]:
        """A prompt of these parts and where each but the last ends, to be given as ``boundaries``.

        Each part has the same token ids in every prompt, as :meth:`warm_documents` reads them: so it is found again
        wherever it stands.
        """
        if not parts:
            raise ConfigError("a prompt needs a part at least; give the texts it is made of")
        tokens = self._encoder.encode(parts[0])
        ends = []
        for part in parts[1:]:
            ends.append(len(tokens))
            tokens += self._encoder.encode_part(part)
        return tokens, ends

    def warm(self, prompt: Prompt, *, boundaries: Sequence[int] = ()) -> int:
        """Read ``prompt`` and keep its KV. Returns the number of chunks that were new.

        Tokens behind the last chunk boundary are not kept: how they round depends on what follows them.
        """
        clock = StageClock()
        tokens = self._encoder.encode(prompt)
        reader, _ = self._reader_for(tokens, GenerationMode.CHUNK_KV_REUSE)
        if reader is None:
            return 0
        with self._turn, reader.open(tokens, boundaries=boundaries, new_rows=0, clock=clock) as reading:
            complete = reading.chunks[-1].end if reading.chunks else 0
            reader.advance(reading, to=complete)
            return reader.commit(reading)

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
        if reader is None:
            with self._turn:
                logits, cache = self._runner.read_whole(tokens)
            clock.lap("first_token")
            report = ReuseReport(0, 0, 0, len(tokens), bitwise=True, timings_ms=clock.stages(), reason=reason)
            return PrefillResult(logits, cache, report)
        move = mode is GenerationMode.CHUNK_KV_REUSE
        with self._turn, reader.open(tokens, boundaries=boundaries, new_rows=64, clock=clock, move=move) as reading:
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
        num_beams, ... Assisted decoding (``assistant_model``, ``prompt_lookup_num_tokens``) runs without
        reuse, and the result says so.
        """
        clock = StageClock()
        tokens = self._encoder.encode(prompt)
        clock.lap("encode")
        request = self._request(tokens, boundaries, max_new_tokens, temperature, streamer, generate_kwargs)
        return self._generate(tokens, mode, request, clock)

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
            return self._generate(tokens, mode, live, clock)

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
        return self._generate(tokens, mode, request, clock)

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

        A batch runs other matrix shapes than a single request, so its numbers may round differently.
        """
        clock = StageClock()
        if not prompts:
            return []
        encoded = [self._encoder.encode(prompt) for prompt in prompts]
        clock.lap("encode")
        longest = max(encoded, key=len)
        request = self._request(longest, (), max_new_tokens, temperature, None, generate_kwargs)
        reader, reason = self._reader_for(longest, mode, request)
        if reader is None or self._parts is None:
            with self._turn:
                return self._decoder.batch_without_cache(encoded, request, clock, reason=reason)

        move = mode is GenerationMode.CHUNK_KV_REUSE

        def read(tokens: list[int]) -> tuple[Reading, PromptReader]:
            return reader.open(tokens, boundaries=(), new_rows=0, clock=clock, move=move), reader

        layout = self._parts.facts.layout
        with self._turn:
            return self._decoder.batch(encoded, read=read, layout=layout, request=request, clock=clock)

    def cache_stats(self) -> CacheStats:
        """What the cache holds and how often it helped. Hits and misses count chunks asked for."""
        return cache_stats(self._store.stats(), parts=self._parts, refusal=self._refusal)

    def hottest_chunks(self, most: int = 10) -> list[HotChunk]:
        """The chunks in memory that were used most often; none if the store does not count."""
        return self._store.hottest(most) if isinstance(self._store, MemoryStore | TieredStore) else []

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
        with self._turn:
            result = calibrate(encoded, boundaries=ends, parts=self._parts, progress=progress)
        if save_to is not None:
            result.save(save_to)
        return result

    def allow_moving(self) -> None:
        """Forget what the shadow checks counted, and move chunks again if they had put an end to it."""
        if self._parts is not None and self._parts.moving is not None:
            self._parts.moving.guard.reset()

    def describe(self) -> dict[str, str]:
        """What this engine can do with its model, and why not more; what ``kvboost doctor`` prints."""
        return describe(self.model, parts=self._parts, refusal=self._refusal)

    def verify_correctness(self, prompt: Prompt | None = None) -> bool:
        """Whether a warm run of ``prompt`` equals a cold one to the last bit, logits and KV.

        Runs with a store of its own beside the engine's, which stays as it is and is not checked. False if
        nothing was reused, so that it cannot pass without having compared anything.
        """
        if self._parts is None:
            return False
        facts, parts = self._parts.facts, self._parts
        vocab = self.model.get_input_embeddings().weight.shape[0]
        made_up = [(i * 7919 + i * i) % vocab for i in range(self.config.chunk_size * 5 + 1)]
        limits = [n for n in (facts.max_positions, facts.exact_limit) if n is not None]
        tokens = self._encoder.encode(prompt if prompt is not None else made_up[: min(limits, default=None)])
        store = GuardedStore(MemoryStore(2 * len(tokens) * facts.layout.bytes_per_token))
        with self._turn:
            return warm_equals_cold(
                lambda pool: parts.exact_reader(store, pool),
                WorkspacePool(facts.layout, capacity_bytes=int(self.config.workspace_bytes)),
                tokens,
            )

    def flush(self) -> None:
        """Return once everything kept so far, for all tenants, is as safe as the tiers below the memory make it."""
        for view in self._tenants.all() if self._viewed is None else ():
            view.flush()
        if isinstance(self._store, TieredStore):
            self._store.flush()

    def clear(self) -> None:
        """Forget everything that was read for this tenant, in every tier. A store that was given forgets all."""
        if self._viewed is not None and not self._owns_store:
            raise ConfigError("the store was given to the engine and is shared by all tenants; clear it there")
        self._store.clear()
        if self._parts:
            self._parts.pool.clear()
            if self._parts.moving is not None:
                self._parts.moving.forget()

    def close(self) -> None:
        """Release the cache. The model stays usable, the engine does not. A store that was given is left alone."""
        if self._closed and self._viewed is not None:
            return  # what it shares may be in use
        self._tenants.drop(self)
        if self._viewed is None:
            for view in self._tenants.all():
                view.close()
            if self._shadow:
                self._shadow.close()
        self._closed = True
        if self._parts:
            self._parts.close()
        if self._owns_store:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self, tokens: list[int], mode: GenerationMode, request: Request, clock: StageClock
    ) -> GenerationResult:
        reader, reason = self._reader_for(tokens, mode, request)
        if reader is None:
            with self._turn:
                return self._decoder.without_cache(tokens, request, clock, reason=reason)
        rows = min(request.max_new_tokens, _MOST_ROWS_AHEAD)
        move = mode is GenerationMode.CHUNK_KV_REUSE
        with (
            self._turn,
            reader.open(tokens, boundaries=request.boundaries, new_rows=rows, clock=clock, move=move) as reading,
        ):
            result = self._decoder.with_cache(reading, reader, request, keep_decoded=self.config.reuse_generated)
            if self._shadow is not None and reading.moved is not None:
                blocks, produced = reading.moved.blocks, list(result.token_ids)
                self._shadow.offer(Answered(tokens, request.boundaries, blocks, produced, reader))
        return result

    def _answers_differ(self, request: Answered) -> bool | None:
        if self._closed:
            return None
        with self._turn:
            return answers_differ(self._runner, request)

    def _reader_for(
        self, tokens: list[int], mode: GenerationMode, request: Request | None = None
    ) -> tuple[PromptReader | None, str | None]:
        """Who reads this prompt: the reader, or nobody and why."""
        if self._closed:
            raise ConfigError("this engine was closed; make a new one around the model")
        if mode is GenerationMode.BASELINE:
            return None, None
        if self._parts is None:
            return None, self._refusal
        limit = self._parts.facts.exact_limit
        if limit is not None and len(tokens) > limit:
            return None, self._parts.facts.exact_limit_reason
        if request is not None and (reason := reads_prompt_again(request.arguments)):
            return None, reason
        return self._parts.reader, None

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
