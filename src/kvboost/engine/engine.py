"""The public engine: its requests and measurements.

What belongs to one tenant's store and prompts is in :mod:`kvboost.engine.tenants`, closing too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvboost.config import parse_bytes
from kvboost.core.costs import StageClock
from kvboost.core.session import Session, nothing_to_fetch
from kvboost.engine.assembly import checked_config, split_settings
from kvboost.engine.mapping import Item, map_requests, requests_of
from kvboost.engine.parts import EngineParts
from kvboost.engine.score import score_many
from kvboost.engine.single import Request, prefill_only, warm
from kvboost.engine.stats import store_stats
from kvboost.engine.tenants import TenantView
from kvboost.engine.text_stream import PieceStream, PieceStreamer
from kvboost.errors import ConfigError
from kvboost.extend import ChunkStore
from kvboost.hf.adapters import AS_SET, AdapterName
from kvboost.hf.loading import ModelSource
from kvboost.hf.prompt import Messages, Prompt
from kvboost.offload.weights.load import load_model
from kvboost.types import GenerationMode, GenerationResult, PrefillResult, Score

if TYPE_CHECKING:
    from kvboost.approx.calibration import Calibration

_REUSE = GenerationMode.CHUNK_KV_REUSE
_SET_QUALITY = "quality is exact; set it to 'auto', 'high' or 'fast'"


class KVBoost(TenantView):
    """A Transformers model with a KV cache that is reused across requests.

    Thread-safe: many threads may call one engine. Settings are keyword arguments, the
    fields of :class:`kvboost.EngineConfig`. ``model`` and ``tokenizer`` are the unchanged Transformers objects.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, store: ChunkStore | None = None, **settings: Any) -> None:
        """Wrap a loaded model. ``tokenizer`` may be None if prompts are always token ids."""
        parts = EngineParts(model, tokenizer, config=checked_config(settings), store=store)
        self._bind(parts, parts.config, parts.assembly.session if parts.assembly is not None else None, root=None)

    def __repr__(self) -> str:
        """The model, what is reused, and how full the memory is."""
        stats, model = store_stats(self._store, self._share), self.model.config.model_type
        reuse = f"quality={self.config.quality!r}" if self.parts.refusal is None else "no reuse"
        return f"<KVBoost {model}, {self.model.dtype}, {reuse}: {stats.chunks} chunks, {stats.bytes / 1e6:.1f} MB>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: a model that :func:`kvboost.attach` was given may be copied, and an engine is of one model."""
        return self

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
    ) -> Self:
        """Load a model and its tokenizer, and wrap them.

        ``name_or_path``, ``dtype`` and every argument that is not a field of :class:`kvboost.EngineConfig`, such as
        ``revision``, go to Transformers' ``from_pretrained``. The default ``device`` is the accelerator if there is
        one. With a ``weight_budget``, such as ``"6GB"``, layers that do not fit are read from disk in every step;
        results are bitwise equal. Their files are written once to ``weight_dir``, by default beside the checkpoint. A
        given ``store`` replaces the engine's own.
        """
        settings, model_kwargs = split_settings(settings_and_model_kwargs)
        model, tokenizer = load_model(
            ModelSource(name_or_path, dtype=dtype, device=device, model_kwargs=model_kwargs),
            weight_budget=parse_bytes(weight_budget, name="weight_budget") if weight_budget is not None else None,
            weight_dir=weight_dir,
        )
        return cls(model, tokenizer, store=store, **settings)

    # Prefill

    def warm(self, prompt: Prompt, *, boundaries: Sequence[int] = (), adapter: AdapterName = AS_SET) -> int:
        """Prefill ``prompt`` and store its KV. Returns the number of new chunks.

        On a grid (see ``kvboost doctor``) the tokens behind the last whole step are not stored.
        """
        clock = StageClock()
        tokens = self.encode(prompt)
        session, _ = self.parts.generator.usable(self.session, tokens, GenerationMode.PREFIX_CACHE)
        with self._running(adapter):
            return warm(session, tokens, boundaries=boundaries, clock=clock) if session is not None else 0

    def prefetch(self, prompt: Prompt, *, boundaries: Sequence[int] = ()) -> Future[int]:
        """Load the stored prefix of ``prompt`` from slower tiers into memory, in the background.

        For queued requests: call it with the ``boundaries`` the request will have. Returns at once. The future's result
        is the number of loaded tokens; ``cancel()`` works until loading starts. Nothing is computed, and nothing is
        pinned: loaded chunks may be evicted before the request runs.
        """
        self._check_open()
        tokens = self.encode(prompt)
        return self.session.prefetch(tokens, boundaries) if self.session is not None else nothing_to_fetch()

    def prefill(
        self,
        prompt: Prompt,
        *,
        mode: GenerationMode = _REUSE,
        boundaries: Sequence[int] = (),
        adapter: AdapterName = AS_SET,
    ) -> PrefillResult:
        """Prefill ``prompt`` and stop before the first new token. The caller owns the returned cache."""
        clock = StageClock()
        tokens = self.encode(prompt)
        clock.lap("encode")
        session, reason = self.parts.generator.usable(self.session, tokens, mode)
        with self._running(adapter):
            if session is None:
                return self.parts.generator.prefill_plain(self.session, tokens, clock, reason=reason)
            return prefill_only(session, tokens, boundaries=boundaries, clock=clock, approx=mode is _REUSE)

    # Documents

    def add_documents(
        self,
        texts: Iterable[Prompt],
        *,
        ids: Iterable[str] | None = None,
        head: Prompt | None = None,
        context_documents: int = 2,
        key: Callable[[Prompt], Any] | None = None,
        progress: bool = True,
    ) -> int:
        """Prefill documents, and find them in any later text or chat, whatever stands around them.

        Each is prefilled behind ``head`` (the prefix your prompts share, such as the system prompt) and
        ``context_documents`` other documents: its neighbours, or with ``key`` those whose keys sort next to its own.
        What is stored already is not prefilled again, so an interrupted run resumes where it stopped. Returns the
        number of new chunks. ``ids`` name the documents, and a name that is known is replaced; without them a text is
        its own name. Each tenant has its own documents, four million tokens of them at most. They are known to this
        engine object only: add them wherever they are to be found. Prompts stored before they were added are cut
        otherwise, and are reused exactly only up to the first document. Raises ConfigError with ``quality="exact"``,
        where only prefixes are reused.
        """
        session = self._session_with_approx("documents are for non-prefix reuse, which this engine does not do")
        from kvboost.approx.documents import add_documents, named_documents

        return add_documents(
            named_documents(texts, self.parts.encoder, self.parts.chunker, ids=ids, key=key),
            session,
            head=self.encode(head) if head is not None else [],
            context_documents=context_documents,
            warm=lambda tokens, ends: self.warm(tokens, boundaries=ends),
            progress=progress,
        )

    def remove_documents(self, ids: Iterable[Prompt]) -> int:
        """Look for these documents no more, by their names. Returns how many there were.

        Their KV stays until it is evicted: it is found as that of any other text.
        """
        session = self._session_with_approx("this engine knows no documents, as it does no non-prefix reuse")
        from kvboost.approx.documents import document_names, registry_of

        return registry_of(session).remove(document_names(self.parts.encoder, ids))

    # Generating

    def generate(
        self,
        prompt: Prompt,
        *,
        mode: GenerationMode = _REUSE,
        boundaries: Sequence[int] = (),
        adapter: AdapterName = AS_SET,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        **generate_kwargs: Any,
    ) -> GenerationResult:
        """Generate a continuation of ``prompt``.

        ``boundaries`` are additional token positions to cut chunks at, such as the ends of documents. ``adapter``
        names one of :meth:`load_adapter`, or None for the base model; left out, it is what :meth:`set_adapter` chose.
        At most ``max_new_tokens`` new tokens; without it ``max_length`` or a ``generation_config`` decides, else
        64. ``temperature=0`` is greedy. Everything else goes to ``model.generate`` and means what it means
        there: top_p, top_k, min_p, penalties, stop_strings, streamer, logits_processor, stopping_criteria,
        num_beams, ... Arguments that would change the prompt's KV are refused. Assisted decoding
        (``assistant_model``, ``prompt_lookup_num_tokens``, ...) runs without reuse, and the result says why.
        """
        clock = StageClock()
        options = {**generate_kwargs, "max_new_tokens": max_new_tokens, "temperature": temperature}
        request = self._request(self.encode(prompt), clock, options, boundaries=boundaries, adapter=adapter)
        return self._generate(request, mode, clock)

    def stream(
        self,
        prompt: Prompt,
        *,
        mode: GenerationMode = _REUSE,
        boundaries: Sequence[int] = (),
        adapter: AdapterName = AS_SET,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        **generate_kwargs: Any,
    ) -> PieceStream:
        """Like :meth:`generate`, piece by piece. The last piece carries the result; closing the stream stops it."""
        clock = StageClock()
        if "streamer" in generate_kwargs:
            raise ConfigError("stream() is the streamer; leave streamer out, or use generate()")
        # Bad arguments are reported here, by the call, rather than by the first piece.
        options = {**generate_kwargs, "max_new_tokens": max_new_tokens, "temperature": temperature}
        request = self._request(self.encode(prompt), clock, options, boundaries=boundaries, adapter=adapter)

        def run(emit: Any, cancelled: Callable[[], bool]) -> GenerationResult:
            streamer = PieceStreamer(self.parts.encoder.decode, emit)
            streamed = replace(request, arguments={**request.arguments, "streamer": streamer}, cancelled=cancelled)
            return self._generate(streamed, mode, clock)

        return PieceStream(run, clock)

    def chat(
        self,
        messages: Messages,
        *,
        mode: GenerationMode = _REUSE,
        adapter: AdapterName = AS_SET,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **generate_kwargs: Any,
    ) -> GenerationResult:
        """Answer a chat, through the tokenizer's template. The ends of messages are chunk boundaries."""
        clock = StageClock()
        tokens, boundaries = self.parts.encoder.encode_chat(
            messages, min_gap=self.parts.chunker.min_tokens, template_kwargs=template_kwargs or {}
        )
        options = {**generate_kwargs, "max_new_tokens": max_new_tokens, "temperature": temperature}
        request = self._request(tokens, clock, options, boundaries=boundaries, adapter=adapter)
        return self._generate(request, mode, clock)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        mode: GenerationMode = _REUSE,
        adapter: AdapterName = AS_SET,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        **generate_kwargs: Any,
    ) -> list[GenerationResult]:
        """Generate for several prompts together; a prefix they share is computed once.

        A batch runs other matrix shapes than a single request, so its numbers may round differently. One after
        another, as by :meth:`generate`, run prompts whose KV exceeds ``kv_bytes``, models without reuse,
        ``mode=BASELINE`` and what only Transformers' own loop can do: beams, several sequences of a prompt, streamers,
        output objects, and ``logits_processor`` or ``stopping_criteria``, which see one prompt then.
        """
        if isinstance(prompts, str):
            raise ConfigError("generate_batch() takes a list of prompts; give [text], or generate() for a single one")
        options = {**generate_kwargs, "max_new_tokens": max_new_tokens, "temperature": temperature}
        requests = list(requests_of(self.parts, prompts, options=options, adapter=adapter))
        with self._running(adapter):
            return self.parts.batches.run(self.session, requests, mode)

    def map(
        self,
        prompts: Iterable[Item],
        *,
        mode: GenerationMode = _REUSE,
        adapter: AdapterName = AS_SET,
        window: int = 256,
        progress: bool = True,
        schema: Any = None,
        **generate_kwargs: Any,
    ) -> Iterator[GenerationResult]:
        """Generate after any number of prompts, as :meth:`generate_batch` does. Results come in their order.

        A prompt may be a chat, and a pair ``(prompt, {"max_new_tokens": 5})`` has arguments of its own. Of each
        ``window`` of prompts those that begin alike run together, and what they share is computed once; a window's
        results come when all of it is done. No more than a window is held, so ``prompts`` may be a generator.

        With a ``schema``, a JSON schema or a pydantic class, an answer is JSON that follows it, unless it is cut off at
        ``max_new_tokens``: then its ``finish_reason`` is ``"length"``. A prompt may have a schema of its own, or None
        for free text. Needs ``kvboost[structured]``.
        """
        if isinstance(prompts, str):
            raise ConfigError("map() takes many prompts; give [text], or generate() for a single one")
        if window < 1:
            raise ConfigError(f"window={window} must be at least 1 prompt")
        self._check_open()

        def run(requests: list[Request], done: Callable[[], Any]) -> list[GenerationResult]:
            with self._running(adapter):
                return self.parts.batches.run(self.session, requests, mode, done=done)

        options = {**generate_kwargs, "schema": schema}
        requests = requests_of(self.parts, prompts, options=options, adapter=adapter)
        total = len(prompts) if isinstance(prompts, Sized) else None
        return map_requests(requests, run, window=window, total=total, progress=progress)

    # Scoring

    def score(self, context: Prompt, continuations: Sequence[Prompt], *, adapter: AdapterName = AS_SET) -> list[Score]:
        """How probable each of ``continuations`` is after ``context``, whose KV is reused and stored.

        Texts are encoded together with the context and cut where it ends; spaces at its end go to the continuations,
        as in EleutherAI's harness. All continuations run in one step over one copy of the context's KV where the
        model's numerics allow it. Approximate KV is never used, whatever the settings. A score has the same bits
        warm and cold, alone and beside others, where ``kvboost doctor`` says bitwise.
        """
        (found,) = self.score_many([(context, continuations)], adapter=adapter, progress=False)
        return found

    def score_many(
        self,
        pairs: Iterable[tuple[Prompt, Sequence[Prompt]]],
        *,
        adapter: AdapterName = AS_SET,
        top_logprobs: int = 0,
        progress: bool = True,
    ) -> list[list[Score]]:
        """As :meth:`score`, for many contexts with their continuations. The results are in the order given.

        Contexts that begin alike run one after another, so that what they share is read once however small the memory.
        Several run in one forward where the model's numerics allow it and none needs what another one computes.
        Their ``top`` has for each token so many (``top_logprobs``) of the likeliest ones in its place.
        """
        with self._running(adapter):
            return score_many(self.parts, self.session, list(pairs), progress=progress, top=top_logprobs)

    def _request(
        self, tokens: list[int], clock: StageClock, options: dict[str, Any], **prefill_options: Any
    ) -> Request:
        clock.lap("encode")
        return self.parts.generator.request(tokens, options, **prefill_options)

    def _generate(self, request: Request, mode: GenerationMode, clock: StageClock) -> GenerationResult:
        with self._running(request.adapter):
            return self.parts.generator.run(self.session, request, mode, clock)

    # Measuring

    def calibrate(
        self,
        prompts: Iterable[Prompt],
        *,
        boundaries: Sequence[Sequence[int]] | None = None,
        save_to: str | Path | None = None,
        progress: bool = True,
    ) -> Calibration:
        """Measure which positions must be recomputed, on prompts in the order of your real traffic.

        Each prompt is prefilled in full and, where it repeats text of earlier ones, with repositioned chunks: with
        several strategies (``recompute_strategy``, if set) at several ratios. ``boundaries`` are those of each prompt,
        as in :meth:`generate`. Pass the file written to ``save_to`` to new engines as ``calibration``: each recomputes
        the fewest positions shown to stay within its quality.
        """
        session = self._session_with_approx("nothing to calibrate: this engine does no non-prefix reuse")
        from kvboost.approx.comparisons import calibrate

        encoded = [self.encode(prompt) for prompt in prompts]
        ends = boundaries if boundaries is not None else [()] * len(encoded)
        if len(ends) != len(encoded):
            raise ConfigError(f"{len(ends)} lists of boundaries for {len(encoded)} prompts; give one for each")
        with self._running(AS_SET):
            result = calibrate(
                list(zip(encoded, ends, strict=True)),
                prefiller=session.prefiller,
                all_strategies=self.config.recompute_strategy is None,
                cache_bytes=int(self.config.cache_bytes),
                progress=progress,
            )
        if save_to is not None:
            result.save(save_to)
        return result

    def _session_with_approx(self, otherwise: str) -> Session:
        """The session, or ConfigError without non-prefix reuse."""
        session = self.session
        if session is None or not session.prefiller.approx.is_on:
            reason = session.prefiller.approx.reason if session is not None else self.parts.refusal
            raise ConfigError(f"{otherwise} ({reason or _SET_QUALITY})")
        return session
