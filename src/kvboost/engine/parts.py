"""What an engine and its tenants' views share: the model, what it supports, and the generator.

Made by :class:`kvboost.KVBoost`. Invariant: ``close`` releases everything made here; the engine calls it after
closing its views.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvboost.capacity import MAX_STEP
from kvboost.config import EngineConfig
from kvboost.core.chunking import FixedChunker
from kvboost.core.prefill import Prefiller
from kvboost.core.spans import ApproxSpans
from kvboost.core.state import ChunkedPrompt
from kvboost.engine.assembly import Assembly, assemble
from kvboost.engine.batches import Batches
from kvboost.engine.single import Generator
from kvboost.engine.structured import Matchers
from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.extend import ChunkStore
from kvboost.hf.adapters import AS_SET, AdapterName, Adapters
from kvboost.hf.environment import pinned_sdpa
from kvboost.hf.fingerprint import decoding_changes_prefill
from kvboost.hf.generate import end_token_ids
from kvboost.hf.prompt import PromptEncoder
from kvboost.hf.runner import ModelRunner
from kvboost.hf.scoring import Scorer
from kvboost.scheduler.jobs import ModelParts

if TYPE_CHECKING:
    from kvboost.approx.shadow import ShadowChecks


_QUIET_S = 0.2  # a batch runner leaves its model for a moment between two steps


class EngineParts(ModelParts):
    """The parts of one engine that do not belong to a tenant. Thread-safe."""

    def __init__(self, model: Any, tokenizer: Any, *, config: EngineConfig, store: ChunkStore | None) -> None:
        if isinstance(model, str | Path):
            raise ConfigError(f"KVBoost wraps a loaded model; to load one, use KVBoost.from_pretrained({str(model)!r})")
        if not hasattr(model, "forward"):
            raise ConfigError(f"a model comes first, and this is a {type(model).__name__}; give (model, tokenizer)")
        if model.training:
            raise ConfigError("the model is in training mode, where dropout changes every answer; call model.eval()")
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.given_store = store
        self.runner = ModelRunner(model)
        self.assembly, self.refusal = self._assemble(store)
        self.chunker = self.assembly.chunker if self.assembly is not None else FixedChunker(config.chunk_tokens)
        if self.assembly is not None:
            self.config = self.assembly.config  # with a number for every size
        facts = self.assembly.facts if self.assembly is not None else None
        self.layout = facts.layout if facts is not None else None
        # Length-dependent RoPE keeps its frequencies on the module. On an accelerator the decode loop of a mixture of
        # experts switches its kernels. Requests of such models must not overlap.
        exclusive = facts is not None and (facts.exact_limit is not None or decoding_changes_prefill(model))
        lock: AbstractContextManager[Any] = threading.RLock() if exclusive else nullcontext()
        devices = {tensor.device for tensor in model.parameters()}
        self.adapters = Adapters(model, self.assembly.identity) if self.assembly is not None else None
        self._activity = Activity()
        uncounted = partial(_running, self.adapters, lock, devices)
        self.running = partial(_counted, self._activity, uncounted)
        self.encoder = PromptEncoder(
            tokenizer,
            max_tokens=facts.max_positions if facts is not None else None,
            vocab_size=model.get_input_embeddings().weight.shape[0],
        )
        self.shadow = self._shadow_checks(uncounted)
        self.offer_check = self._offer_check
        self.generator = Generator(
            self.runner,
            encoder=self.encoder,
            tokenizer=tokenizer,
            offer_check=self.offer_check,
            facts=facts,
            refusal=self.refusal,
        )
        self.batches = Batches(self.generator, encoder=self.encoder, tokenizer=tokenizer, parts=self)

    @cached_property
    def matchers(self) -> Matchers:
        """What holds answers to schemas."""
        own = getattr(self.tokenizer, "eos_token_id", None)  # of chat models often the end of a turn
        ends = end_token_ids(self.model, {}) | ({int(own)} if own is not None else set())
        rows = int(self.model.get_input_embeddings().weight.shape[0])
        return Matchers(self.tokenizer, vocab_size=rows, end_token_ids=ends)

    def _assemble(self, store: ChunkStore | None) -> tuple[Assembly | None, str | None]:
        try:
            return assemble(self.runner, self.tokenizer, config=self.config, store=store), None
        except UnsupportedModelError as error:
            if self.config.strict:
                raise
            if self.config.kv_bytes is not None:
                raise ConfigError(f"kv_bytes does not work with this model ({error}); leave it out") from error
            warnings.warn(f"running without reuse: {error}", stacklevel=4)
            return None, str(error)

    def _shadow_checks(self, running: Callable[..., AbstractContextManager[None]]) -> ShadowChecks | None:
        if self.config.checked_share <= 0.0 or self.assembly is None:
            return None
        prefiller = self.assembly.session.prefiller
        if not prefiller.approx.is_on:
            return None
        from kvboost.approx.shadow import shadow_checks

        idle = self._activity.idle if self.config.checks_when_idle else None
        shadow = shadow_checks(prefiller, share=self.config.checked_share, running=running, idle=idle)
        if shadow is not None:
            weakref.finalize(self, shadow.stop)
        return shadow

    @cached_property
    def scorer(self) -> Scorer:
        """What scores texts after a prefill."""
        layout = self.layout
        assert layout is not None
        return Scorer(self.runner, layout, max_step=self.max_step)

    @property
    def max_step(self) -> int:
        """Tokens that one step of a prefill computes, at most."""
        return self.assembly.session.prefiller.rule.max_tokens if self.assembly is not None else MAX_STEP

    def owned_adapters(self) -> Adapters:
        """The model's adapters, or ConfigError for a model without reuse."""
        if self.adapters is None:
            raise ConfigError(f"this engine does not manage adapters ({self.refusal}); use PEFT's methods")
        return self.adapters

    def _offer_check(
        self,
        prefiller: Prefiller,
        prompt: ChunkedPrompt,
        spans: ApproxSpans | None,
        produced: Sequence[int],
        adapter: AdapterName,
    ) -> None:
        if self.shadow is None or spans is None:
            return
        from kvboost.approx.shadow import ServedRequest

        self.shadow.offer(ServedRequest.of(prompt, spans, produced, prefiller, adapter))

    @property
    def owns_store(self) -> bool:
        """Whether the engine made its store itself, and closes it."""
        return self.given_store is None

    def check_purge(self) -> None:
        """Raise ConfigError if the store cannot tell tenants apart."""
        if self.assembly is not None and self.assembly.stores is None:
            raise ConfigError(
                "the store was given to this engine, which cannot tell tenants apart in it; remove them there"
            )

    def purge(self, tenant: str | None) -> None:
        """Remove a tenant, or all, from every tier below the memory."""
        if self.assembly is not None and self.assembly.stores is not None:
            self.assembly.stores.purge(tenant)

    def close(self) -> None:
        """Stop the shadow checks and remove all hooks from the model."""
        self.closed = True
        if self.shadow is not None:
            self.shadow.close()
        if self.assembly is not None:
            self.assembly.close()


@contextmanager
def _counted(
    activity: Activity, running: Callable[[AdapterName], AbstractContextManager[None]], adapter: AdapterName = AS_SET
) -> Iterator[None]:
    with activity, running(adapter):
        yield


@contextmanager
def _running(
    adapters: Adapters | None,
    lock: AbstractContextManager[Any],
    devices: Collection[torch.device],
    adapter: AdapterName = AS_SET,
) -> Iterator[None]:
    """Holds no engine reference, so that a thread with it does not keep the engine alive."""
    if adapters is None:
        if adapter is not AS_SET:
            raise ConfigError("this engine reuses nothing with this model; choose adapters on the model itself")
        with lock, pinned_sdpa(devices):
            yield
        return
    # In this order: a request that waits for its adapter must not hold the lock that others need.
    with adapters.using(adapter), lock, pinned_sdpa(devices):
        yield


class Activity:
    """Counts the requests that use the model: ``with activity``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running, self._ended = 0, 0.0

    def idle(self) -> bool:
        """Whether the model has not been used for a moment."""
        with self._lock:
            return not self._running and time.monotonic() - self._ended > _QUIET_S

    def __enter__(self) -> None:
        with self._lock:
            self._running += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._running -= 1
            self._ended = time.monotonic()
