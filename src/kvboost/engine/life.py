"""An engine's life: made around a model, seen by tenants, described, verified, closed. No requests.

The base of :class:`kvboost.KVBoost`, which reads and generates. Invariant: what is made here is let go of by ``close``.
"""

from __future__ import annotations

import dataclasses
import difflib
import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from kvboost.approx.shadow import Answered, ShadowChecks, answers_differ
from kvboost.capacity import MemoryEstimate
from kvboost.config import EngineConfig, parse_bytes
from kvboost.core.chunking import make_chunker
from kvboost.core.guarded import GuardedStore
from kvboost.core.prefill import Prefiller
from kvboost.core.verify import warm_equals_cold
from kvboost.core.workspaces import WorkspacePool
from kvboost.engine.assembly import Assembly, assemble, check_settings
from kvboost.engine.decoding import Decoder, Request
from kvboost.engine.memory import estimate_loaded, workload
from kvboost.engine.stats import cache_stats, describe
from kvboost.engine.tenants import TenantViews, purge_tenant
from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.extend import ChunkStore
from kvboost.hf.draft import Draft, make_draft
from kvboost.hf.generate import reads_prompt_again
from kvboost.hf.loading import ModelSource
from kvboost.hf.prompt import Prompt, PromptEncoder
from kvboost.hf.runner import ModelRunner
from kvboost.hf.shape import shape_of
from kvboost.hf.weights import weights_of
from kvboost.offload.weights import load_model
from kvboost.store import MemoryStore, TieredStore
from kvboost.types import CacheStats, GenerationMode, HotChunk


class EngineLife:
    """What every engine has, whatever it is asked."""

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
        self._draft: Draft | None = None
        if self.config.draft is not None:
            self._draft = make_draft(self.config.draft, model=model, tokenizer=tokenizer)
        self._runner = ModelRunner(model)
        self._chunker = make_chunker(self.config.chunking, size=self.config.chunk_size)
        self._closed = False
        self._tenants = TenantViews()
        self._viewed: Self | None = None  # the engine this one is a tenant's view of
        self._parts: Assembly | None = None
        self._refusal: str | None = None
        try:
            self._parts = assemble(self._runner, config=self.config, chunker=self._chunker, store=store)
        except UnsupportedModelError as error:
            if self.config.strict:
                raise
            if self.config.kv_bytes is not None:
                raise ConfigError(f"kv_bytes does not work with this model ({error}); leave it out") from error
            warnings.warn(f"running without reuse: {error}", stacklevel=2)
            self._refusal = str(error)
        self._owns_store = store is None
        self._store: ChunkStore = self._parts.store if self._parts else store or MemoryStore(0)
        # Length-dependent RoPE keeps its frequencies on the module: requests of different lengths must take turns.
        takes_turns = self._parts is not None and self._parts.facts.exact_limit is not None
        self._model_lock: AbstractContextManager[Any] = threading.RLock() if takes_turns else nullcontext()
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
    ) -> Self:
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
            ModelSource(name_or_path, dtype=dtype, device=device, model_kwargs=model_kwargs),
            weight_budget=parse_bytes(weight_budget, name="weight_budget") if weight_budget is not None else None,
            weight_dir=weight_dir,
        )
        return cls(model, tokenizer, store=store, **settings)

    def for_tenant(self, tenant: str) -> Self:
        """This engine for another tenant, who finds nothing of what the others read, in no tier.

        It shares the model, the memory's budget and all connections, takes a few milliseconds to make and is the same
        object for every call. It may be closed by itself and is closed with this engine.
        """
        return cast(Self, self._tenants.get(self._viewed or self, tenant))

    def views(self) -> list[Self]:
        """This engine and what :meth:`for_tenant` made of it that is still open."""
        whole = self._viewed or self
        return [whole, *cast(list[Self], whole._tenants.all())]

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

    def cache_stats(self) -> CacheStats:
        """What the cache holds and how often it helped. Hits and misses count chunks asked for."""
        return cache_stats(self._store.stats(), parts=self._parts, refusal=self._refusal)

    def hottest_chunks(self, most: int = 10) -> list[HotChunk]:
        """The chunks in memory that were used most often; none if the store does not count."""
        return self._store.hottest(most) if isinstance(self._store, MemoryStore | TieredStore) else []

    def allow_non_prefix_reuse(self) -> None:
        """Forget what the shadow checks counted, and move chunks again if they had put an end to it."""
        if self._parts is not None and self._parts.moving is not None:
            self._parts.moving.guard.reset()

    def describe(self) -> dict[str, str]:
        """What this engine can do with its model, and why not more; what ``kvboost doctor`` prints."""
        told = describe(self.model, parts=self._parts, refusal=self._refusal)
        return told if self._draft is None else {**told, "draft": self._draft.name}

    def estimate_memory(self, *, context: int, batch: int = 1, stored_tokens: int | None = None) -> MemoryEstimate:
        """The peak memory of ``batch`` requests side by side with ``context`` tokens each, prompt and answer.

        Counts all caches as full, as they are after a while, unless ``stored_tokens`` says how many tokens have been
        kept. What the process holds beside weights and caches is measured. A draft and its KV come on top.
        ``kvboost doctor`` estimates without loading.
        """
        if self._parts is None:
            raise ConfigError(f"the memory of a model whose KV is not known cannot be estimated ({self._refusal})")
        layout, pool = self._parts.facts.layout, self._parts.pool
        work = workload(
            self.config,
            context=context,
            batch=batch,
            layout=layout,
            stored_tokens=stored_tokens,
        )
        held = self._store.stats().bytes + pool.idle_bytes
        return estimate_loaded(shape_of(self.model, layout), weights_of(self.model), work, held=held)

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
        with self._model_lock:
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

    def _answers_differ(self, request: Answered) -> bool | None:
        if self._closed:
            return None
        with self._model_lock:
            return answers_differ(self._runner, request)

    def _reader_for(
        self, tokens: list[int], mode: GenerationMode, request: Request | None = None
    ) -> tuple[Prefiller | None, str | None]:
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
        if request is not None and (reason := reads_prompt_again(self.model, request.arguments)):
            return None, reason
        return self._parts.reader, None
