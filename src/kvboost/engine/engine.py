"""The public engine: one verb after another, each a screen at most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvboost.capacity import MemoryEstimate
from kvboost.config import EngineConfig, parse_bytes
from kvboost.core.backend import NoApprox
from kvboost.core.clock import StageClock
from kvboost.core.session import Session, nothing_to_fetch
from kvboost.engine.assembly import split_settings
from kvboost.engine.generation import Request, prefill_only, warm
from kvboost.engine.memory import estimate_loaded, workload
from kvboost.engine.parts import EngineParts
from kvboost.engine.stats import cache_stats, describe, verify
from kvboost.engine.tenants import TenantViews
from kvboost.engine.text_stream import PieceStream, PieceStreamer
from kvboost.errors import ConfigError
from kvboost.extend import ChunkStore, LayeredStore
from kvboost.hf.adapters import AS_SET, AdapterName
from kvboost.hf.loading import ModelSource
from kvboost.hf.prompt import Messages, Prompt
from kvboost.offload.weights import load_model
from kvboost.store import MemoryStore, TieredStore
from kvboost.types import CacheStats, GenerationMode, GenerationResult, HotChunk, PrefillResult

if TYPE_CHECKING:
    from kvboost.approx.calibration import Calibration

_REUSE = GenerationMode.CHUNK_KV_REUSE


class KVBoost:
    """A Transformers model that remembers what it has read.

    Thread-safe: many threads may call one engine. Settings are keyword arguments, the
    fields of :class:`kvboost.EngineConfig`. ``model`` and ``tokenizer`` stay the Transformers objects they are.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, store: ChunkStore | None = None, **settings: Any) -> None:
        """Wrap a loaded model. ``tokenizer`` may be None if prompts are always token ids."""
        try:
            config = EngineConfig(**settings)
        except TypeError as error:
            raise ConfigError(f"unknown setting: {error}") from error
        parts = EngineParts(model, tokenizer, config=config, store=store)
        self._bind(parts, config, parts.assembly.session if parts.assembly is not None else None, root=None)

    def _bind(self, parts: EngineParts, config: EngineConfig, session: Session | None, root: Self | None) -> None:
        self.model, self.tokenizer, self.config = parts.model, parts.tokenizer, config
        self.parts, self.session = parts, session
        """Internals, for the scheduler and the server: they may change with any version."""
        self._store: ChunkStore = session.store if session is not None else parts.given_store or MemoryStore(0)
        self._root = root
        """The engine this one is a tenant's view of."""
        self._views: TenantViews[Self] = TenantViews()
        self._closed = False

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

        ``name_or_path``, ``dtype`` and all that is no setting of :class:`kvboost.EngineConfig` go to Transformers'
        ``from_pretrained``. Without a ``device`` the model goes to the accelerator if there is one. With a
        ``weight_budget``, such as ``"6GB"``, the layers that do not fit are read from disk in every step, to the same
        bits; their files are made once in ``weight_dir``, beside the checkpoint if left out. Chunks are kept in
        ``store`` instead of in one of the engine's own.
        """
        settings, model_kwargs = split_settings(settings_and_model_kwargs)
        model, tokenizer = load_model(
            ModelSource(name_or_path, dtype=dtype, device=device, model_kwargs=model_kwargs),
            weight_budget=parse_bytes(weight_budget, name="weight_budget") if weight_budget is not None else None,
            weight_dir=weight_dir,
        )
        return cls(model, tokenizer, store=store, **settings)

    # Reading

    def warm(self, prompt: Prompt, *, boundaries: Sequence[int] = (), adapter: AdapterName = AS_SET) -> int:
        """Read ``prompt`` and keep its KV. Returns the number of chunks that were new.

        Tokens behind the last chunk boundary are not kept: how they round depends on what follows them.
        """
        clock = StageClock()
        tokens = self.encode(prompt)
        session, _ = self.parts.generator.usable(self.session, tokens, GenerationMode.PREFIX_CACHE)
        with self._running(adapter):
            return warm(session, tokens, boundaries=boundaries, clock=clock) if session is not None else 0

    def prefetch(self, prompt: Prompt, *, boundaries: Sequence[int] = ()) -> Future[int]:
        """Bring what slower tiers have of the beginning of ``prompt`` up into memory, in the background.

        For requests that wait for their turn, with the ``boundaries`` they will have: when it comes, loading is over
        or under way. Returns at once; the future's result is how many tokens came up, and ``cancel()`` takes one back
        that has not begun. Nothing is computed, and nothing is held: memory that is full of other things lets it go.
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
        """Read ``prompt`` and stop before the first new token. The returned cache is the caller's own."""
        clock = StageClock()
        tokens = self.encode(prompt)
        clock.lap("encode")
        session, reason = self.parts.generator.usable(self.session, tokens, mode)
        with self._running(adapter):
            if session is None:
                return self.parts.generator.prefill_plain(self.session, tokens, clock, reason=reason)
            return prefill_only(session, tokens, boundaries=boundaries, clock=clock, approx=mode is _REUSE)

    def warm_documents(
        self,
        documents: Iterable[Prompt],
        *,
        head: Prompt | None = None,
        context_documents: int = 2,
        key: Callable[[Prompt], Any] | None = None,
        progress: bool = True,
    ) -> int:
        """Read documents so that they can be reused anywhere in later prompts. Returns how many chunks were new.

        Each is read behind ``head`` (the beginning your prompts share, such as the system prompt) and
        ``context_documents`` other documents: its neighbours, or with ``key`` those whose keys sort next to its own.
        Documents whose text is already stored are skipped, so a run that was broken off goes on where it stopped.
        """
        session = self._session_with_approx("documents are read for non-prefix reuse, which this engine does not do")
        from kvboost.approx.documents import warm_documents

        encoder, ordered = self.parts.encoder, documents if key is None else sorted(documents, key=key)
        return warm_documents(
            [encoder.encode_part(document) for document in ordered],
            head=encoder.encode(head) if head is not None else [],
            context_documents=context_documents,
            session=session,
            warm=lambda tokens, ends: self.warm(tokens, boundaries=ends),
            progress=progress,
        )

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
        """Generate behind ``prompt``.

        ``boundaries`` are token positions to cut at, beside the chunker's own (ends of documents, say). ``adapter``
        names one of :meth:`load_adapter`, or None for the base model; left out, it is what :meth:`set_adapter` chose.
        At most ``max_new_tokens`` new tokens; without it ``max_length`` or a ``generation_config`` decides, else
        64. ``temperature=0`` is greedy. Everything else goes to ``model.generate`` and means what it means
        there: top_p, top_k, min_p, penalties, stop_strings, streamer, logits_processor, stopping_criteria,
        num_beams, ... What would change how the model reads the prompt is refused. A draft given here
        (``assistant_model``, ``prompt_lookup_num_tokens``) takes the place of the engine's own, and
        ``assistant_model=None`` that of none. Other assisted decoding runs without reuse, and the result says so.
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
            live = replace(request, arguments={**request.arguments, "streamer": streamer}, cancelled=cancelled)
            return self._generate(live, mode, clock)

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

        A batch runs other matrix shapes than a single request, so its numbers may round differently. The engine's
        draft is not used. One whose KV would take more than ``kv_bytes`` runs prompt by prompt.
        """
        clock = StageClock()
        if not prompts:
            return []
        encoded = [self.encode(prompt) for prompt in prompts]
        options = {**generate_kwargs, "max_new_tokens": max_new_tokens, "temperature": temperature}
        request = self._request(max(encoded, key=len), clock, options, adapter=adapter)
        with self._running(adapter):
            return self.parts.generator.run_batch(self.session, encoded, mode, request, clock)

    def _request(self, tokens: list[int], clock: StageClock, options: dict[str, Any], **place: Any) -> Request:
        clock.lap("encode")
        return self.parts.generator.request(tokens, options, **place)

    def _generate(self, request: Request, mode: GenerationMode, clock: StageClock) -> GenerationResult:
        generator, draft = self.parts.generator, self.parts.draft
        if draft is not None and mode is not GenerationMode.BASELINE:
            request = generator.with_draft(request, draft, self.session)
        with self._running(request.adapter):
            return generator.run(self.session, request, mode, clock)

    def _running(self, adapter: AdapterName) -> AbstractContextManager[None]:
        self._check_open()
        return self.parts.running(adapter)

    def _check_open(self) -> None:
        if self._closed or self.parts.closed:
            raise ConfigError("this engine was closed; make a new one around the model")

    # Adapters and weights

    def load_adapter(self, name: str, path_or_id: str, *, replace: bool = False, **load_kwargs: Any) -> str:
        """Load a PEFT adapter from a folder or the hub; returns the digest of its tensors, which its KV is kept under.

        It is not used until :meth:`set_adapter` or ``generate(adapter=name)`` says so. ``replace`` overwrites one that
        is loaded; everything else goes to PEFT. Waits for requests that run.
        """
        return self.parts.owned_adapters().load(name, path_or_id, replace=replace, **load_kwargs)

    def set_adapter(self, name: str | None) -> None:
        """Use this adapter for requests that name none; None is the base model. Waits for requests that run."""
        self.parts.owned_adapters().use(name)

    def weights_changed(self) -> None:
        """Tell the engine that weights were written behind its back, where it cannot see it.

        PEFT's ``hotswap_adapter``, writes through ``.data`` and merges that are undone leave no trace in a tensor.
        """
        self.parts.owned_adapters().weights_changed()

    # Measuring

    def calibrate(
        self,
        prompts: Iterable[Prompt],
        *,
        boundaries: Sequence[Sequence[int]] | None = None,
        save_to: str | Path | None = None,
        progress: bool = True,
    ) -> Calibration:
        """Measure how many positions must be recomputed, on prompts as your traffic has them, in their order.

        Each prompt is read whole and, where earlier ones left text that turns up in it, with repositioned chunks at
        several ratios. ``boundaries`` are each prompt's, as :meth:`generate` takes them. Give the file written to
        ``save_to`` to new engines as ``calibration``: each takes the smallest ratio shown to keep within its quality.
        """
        session = self._session_with_approx("nothing to calibrate: this engine does no non-prefix reuse")
        from kvboost.approx.calibrate import calibrate

        encoded = [self.encode(prompt) for prompt in prompts]
        ends = boundaries if boundaries is not None else [()] * len(encoded)
        if len(ends) != len(encoded):
            raise ConfigError(f"{len(ends)} lists of boundaries for {len(encoded)} prompts; give one for each")
        pairs, size = list(zip(encoded, ends, strict=True)), int(self.config.cache_bytes)
        with self._running(AS_SET):
            result = calibrate(pairs, prefiller=session.prefiller, cache_bytes=size, progress=progress)
        if save_to is not None:
            result.save(save_to)
        return result

    def verify_correctness(self, prompt: Prompt | None = None) -> bool:
        """Whether a warm run of ``prompt`` equals a cold one to the last bit, logits and KV.

        Runs with a store of its own beside the engine's, which stays as it is and is not checked. False if
        nothing was reused, so that it cannot pass without having compared anything.
        """
        if self.session is None:
            return False
        with self._running(AS_SET):
            return verify(self.session, self.parts, self.encode(prompt) if prompt is not None else None)

    def estimate_memory(self, *, context: int, batch: int = 1, stored_tokens: int | None = None) -> MemoryEstimate:
        """The peak memory of ``batch`` requests side by side with ``context`` tokens each, prompt and answer.

        Counts all caches as full, as they are after a while, unless ``stored_tokens`` says how many tokens have been
        kept. What the process holds beside weights and caches is measured. ``kvboost doctor`` estimates without
        loading. A draft and its KV come on top.
        """
        if self.session is None or self.parts.layout is None:
            raise ConfigError(f"the memory of a model whose KV is not known cannot be told ({self.parts.refusal})")
        layout, held = self.parts.layout, self._store.stats().bytes + self.session.prefiller.pool.idle_bytes
        work = workload(self.config, context=context, batch=batch, layout=layout, stored_tokens=stored_tokens)
        return estimate_loaded(self.model, layout, work, held=held)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids that ``prompt`` stands for, checked as every call checks them."""
        return self.parts.encoder.encode(prompt)

    def join(self, parts: Sequence[Prompt]) -> tuple[list[int], list[int]]:
        """A prompt of these parts and where each but the last ends, to be given as ``boundaries``.

        Each part has the same token ids in every prompt, as :meth:`warm_documents` reads them: so it is found again
        wherever it stands.
        """
        return self.parts.encoder.join(parts)

    def cache_stats(self) -> CacheStats:
        """What the cache holds and how often it helped. Hits and misses count chunks asked for."""
        return cache_stats(self._store.stats(), session=self.session, refusal=self.parts.refusal)

    def hottest_chunks(self, limit: int = 10) -> list[HotChunk]:
        """The chunks in memory that were used most often; none if the store does not count."""
        return self._store.hottest(limit) if isinstance(self._store, MemoryStore | TieredStore) else []

    def describe(self) -> dict[str, str]:
        """What this engine can do with its model, and why not more; what ``kvboost doctor`` prints."""
        return describe(self.parts, self.session)

    def allow_non_prefix_reuse(self) -> None:
        """Forget what the shadow checks counted, and reposition chunks again if they had put an end to it."""
        if self.session is not None:
            self.session.prefiller.approx.allow()

    # Tenants and the end

    def for_tenant(self, tenant: str) -> Self:
        """This engine for another tenant, who finds nothing of what the others read, in no tier.

        It shares the model, the memory's budget and all connections, takes a few milliseconds to make and is the same
        object for every call. It may be closed by itself and is closed with this engine.
        """
        root = self._root or self
        self._check_open()
        return root if tenant == root.config.tenant else root._views.get(tenant, make=root._view)

    def _view(self, tenant: str) -> Self:
        assembly, view = self.parts.assembly, type(self).__new__(type(self))
        session = assembly.open_session(tenant) if assembly is not None else None
        view._bind(self.parts, replace(self.config, tenant=tenant), session, root=self)
        return view

    def views(self) -> list[Self]:
        """This engine and what :meth:`for_tenant` made of it that is still open."""
        root = self._root or self
        return [root, *root._views.all()]

    def purge_tenant(self, tenant: str) -> None:
        """Remove everything that was kept for a tenant, of whatever model, from every tier. Let its requests end first.

        Raises StoreError if a tier could not be asked. What other processes hold in memory, they purge themselves.
        """
        root = self._root or self
        self.parts.check_purge()
        was_open = tenant == root.config.tenant or tenant in root._views
        view = root.for_tenant(tenant)
        view.clear()
        if not was_open:
            view.close()
        self.parts.purge(tenant)

    def flush(self) -> None:
        """Return once everything kept so far, for all tenants, is as safe as the tiers below the memory make it."""
        for view in self.views() if self._root is None else [self]:
            if isinstance(view._store, LayeredStore):
                view._store.flush()

    def clear(self) -> None:
        """Forget everything that was read for this tenant, in every tier. A store that was given forgets all."""
        if self._root is not None and not self.parts.owns_store:
            raise ConfigError("the store was given to the engine and is shared by all tenants; clear it there")
        self._store.clear()
        if self.session is not None:
            self.session.clear()

    def close(self) -> None:
        """Release the cache. The model stays usable, the engine does not. A store that was given is left alone."""
        if self._closed:
            return  # what it shares may be in use
        self._closed = True
        if self._root is not None:
            self._root._views.drop(self.config.tenant)
        else:
            for view in self.views()[1:]:
                view.close()
            self.parts.close()
        if self.session is not None:
            self.session.prefiller.pool.clear()
        if self.parts.owns_store:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _session_with_approx(self, otherwise: str) -> Session:
        """The session, or ConfigError if it repositions nothing."""
        approx = self.session.prefiller.approx if self.session is not None else NoApprox(self.parts.refusal)
        if self.session is None or isinstance(approx, NoApprox):
            raise ConfigError(f"{otherwise} ({approx.reason or 'quality is exact'})")
        return self.session
