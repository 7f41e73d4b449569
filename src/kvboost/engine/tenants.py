"""One tenant's view of an engine: its prompts, its store, the model's adapters, and how it is cleared and closed.

:class:`kvboost.KVBoost` is such a view, with the requests added. Invariants: no document's own text or tokens change;
no view's keys occur in another's; there is one view for each tenant; closing the engine closes its views before what
they share.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

from kvboost.capacity import MemoryEstimate
from kvboost.config import EngineConfig
from kvboost.core.arrange import ServedPaths
from kvboost.core.costs import StageClock
from kvboost.core.keys import token_array
from kvboost.core.session import Session
from kvboost.engine.estimate import estimate_engine
from kvboost.engine.parts import EngineParts
from kvboost.engine.pinning import Pin, Pins
from kvboost.engine.single import warm
from kvboost.engine.stats import TierState, cache_stats, describe, store_stats, tier_states, verify
from kvboost.engine.stores import OwnStore
from kvboost.errors import ConfigError
from kvboost.extend import ChunkStore, LayeredStore, StoreListener
from kvboost.hf.adapters import AS_SET, AdapterName
from kvboost.hf.prompt import Prompt
from kvboost.store import MemoryStore, TieredStore
from kvboost.types import CacheStats, HotChunk


@dataclass(frozen=True)
class ArrangedPrompt:
    """Documents in the order that begins with most text served before, and the prompt of them."""

    parts: tuple[Prompt, ...]
    """Head, documents, ranks, volatile text, question: for :meth:`KVBoost.join`, or as the text of a chat."""
    order: tuple[int, ...]
    """For each position the document's index as given."""
    served_documents: int
    """The leading documents that stood in this order before, behind the same head."""
    served_tokens: int
    """Their tokens: what is reused exactly behind the head, unless it was evicted."""


class TenantView:
    """One tenant's view of an engine: its session and store, and what it shares with the others."""

    def _bind(self, parts: EngineParts, config: EngineConfig, session: Session | None, root: Self | None) -> None:
        self.model, self.tokenizer, self.config = parts.model, parts.tokenizer, config
        self.parts, self.session = parts, session
        """Internals, for the scheduler and the server: they may change with any version."""
        self._store: ChunkStore = session.store if session is not None else parts.given_store or MemoryStore(0)
        self._share: str | None = config.tenant if parts.owns_store else None
        """Whose part of the store this is; None for all of a store that was given."""
        self._served = ServedPaths()
        self._root = root
        """The engine that this tenant's view belongs to; None for the engine itself."""
        self.pins: Pins = root.pins if root is not None else Pins(shared_store=not parts.owns_store)
        self._views: dict[str, Self] = {}
        self._views_lock = threading.Lock()
        self._closed = False
        self._released = threading.Event()

    def for_tenant(self, tenant: str) -> Self:
        """This engine for another tenant, which shares no chunks with the others in any tier.

        It shares the model, the memory budget and all connections, takes a few milliseconds to make and is the same
        object for every call. It may be closed on its own and is closed with this engine.
        """
        if not isinstance(tenant, str):
            raise ConfigError(f"tenant={tenant!r} is no name; give a text")
        root = self._root or self
        self._check_open()
        if tenant == root.config.tenant:
            return root
        while True:
            with root._views_lock:
                if tenant not in root._views:
                    root._views[tenant] = root._view(tenant)
                view = root._views[tenant]
            if not view._closed:
                return view
            view._released.wait()  # what it writes last, this tenant's next view may find

    def _view(self, tenant: str) -> Self:
        assembly, view = self.parts.assembly, type(self).__new__(type(self))
        session = assembly.open_session(tenant) if assembly is not None else None
        view._bind(self.parts, replace(self.config, tenant=tenant), session, root=self)
        return view

    def views(self) -> list[Self]:
        """This engine and its open views from :meth:`for_tenant`."""
        root = self._root or self
        with root._views_lock:
            return [root, *root._views.values()]

    # Prompts

    def encode(self, prompt: Prompt) -> list[int]:
        """The validated token ids of ``prompt``."""
        return self.parts.encoder.encode(prompt)

    def join(self, parts: Sequence[Prompt]) -> tuple[list[int], list[int]]:
        """A prompt of these parts and where each but the last ends, to be given as ``boundaries``.

        Each part has the same token ids in every prompt and in :meth:`add_documents`, so it is found again at any
        position.
        """
        return self.parts.encoder.join(parts)

    def arrange(
        self,
        *,
        documents: Sequence[Prompt],
        head: Prompt | None = None,
        volatile: Prompt | None = None,
        question: Prompt | None = None,
        keep: tuple[int, int] = (0, 0),
        ranks: str | None = None,
    ) -> ArrangedPrompt:
        """Put documents in an order whose beginning is cached, so that more of the prompt is reused exactly.

        It begins as an order of an earlier call behind the same ``head``; the rest is as given. ``volatile`` is text
        that changes with every request, such as a date: it goes behind the documents. ``keep=(1, 2)`` leaves the first
        document and the last two where they are. ``ranks`` is a line behind the documents, such as
        ``"Most relevant first: {}.\\n"``; ``{}`` becomes the positions of the documents in the order as given,
        "3, 1, 2". Nothing is computed. Call it once for each prompt you send.
        """
        if isinstance(documents, str):
            raise ConfigError("documents is a list of texts; give [text] for a single one")
        first, last = keep
        if first < 0 or last < 0:
            raise ConfigError(f"keep={keep} must be two counts of documents, such as (1, 0); give no negative ones")
        if ranks is not None and ranks.count("{}") != 1:
            raise ConfigError(f"ranks={ranks!r} does not say where the ranks go; put {{}} there, once")
        self._check_open()
        order = self._served.arrange(
            self._digest(head) if head is not None else b"",
            [self._digest(document) for document in documents],
            tokens=lambda index: len(self.parts.encoder.encode_part(documents[index])),
            keep_first=first,
            keep_last=last,
        )
        positions = sorted(range(len(order.indexes)), key=order.indexes.__getitem__)
        named = ranks.replace("{}", ", ".join(str(at + 1) for at in positions)) if ranks and positions else None
        everything = (head, *(documents[index] for index in order.indexes), named, volatile, question)
        parts = tuple(part for part in everything if part is not None)
        return ArrangedPrompt(parts, order.indexes, order.served_documents, order.served_tokens)

    def _digest(self, part: Prompt) -> bytes:
        """Names a text or token ids; texts are not encoded for it."""
        if isinstance(part, str):
            return hashlib.sha256(b"text" + part.encode("utf-8", "surrogatepass")).digest()
        return hashlib.sha256(b"ids" + token_array(self.parts.encoder.encode(part)).tobytes()).digest()

    # Looking

    def cache_stats(self, *, ask_tiers: bool = True) -> CacheStats:
        """What the cache holds and how often it helped. Hits and misses count looked-up chunks.

        ``ask_tiers=False`` does no I/O: what tiers below the memory hold is then as it was last asked.
        """
        stats = store_stats(self._store, self._share, ask_tiers=ask_tiers)
        return cache_stats(stats, self._store, session=self.session, parts=self.parts)

    def tier_states(self) -> dict[str, TierState]:
        """The tiers below the memory, of all tenants together: whether they answer, and what they did. No I/O."""
        assembly = self.parts.assembly
        shared = assembly.stores if assembly is not None else None
        return tier_states(self._store, shared)

    def hottest_chunks(self, limit: int = 10) -> list[HotChunk]:
        """The chunks in memory that were used most often; none if the store does not count."""
        return self._store.hottest(limit) if isinstance(self._store, MemoryStore | TieredStore) else []

    def held_keys(self, limit: int) -> list[tuple[bytes, bytes]]:
        """Key and content key of the chunks in memory, of all tenants; the most used if there are more. No I/O."""
        return self._store.held_keys(limit) if isinstance(self._store, MemoryStore | TieredStore) else []

    def describe(self) -> dict[str, str]:
        """What this engine can do with its model, and why not more; what ``kvboost doctor`` prints."""
        return describe(self.parts, self.session)

    def verify_correctness(self, prompt: Prompt | None = None) -> bool:
        """Whether a warm run of ``prompt`` equals a cold one to the last bit, logits and KV.

        Runs with a separate store; the engine's own is neither changed nor checked. False if nothing was reused, so
        that it cannot pass without a comparison.
        """
        if self.session is None:
            return False
        with self._running(AS_SET):
            return verify(self.session, self.parts, self.encode(prompt) if prompt is not None else None)

    def estimate_memory(self, *, context: int, batch: int = 1, stored_tokens: int | None = None) -> MemoryEstimate:
        """The peak memory of ``batch`` concurrent requests with ``context`` tokens each, prompt and answer.

        Counts all caches as full unless ``stored_tokens`` gives the number of stored tokens. The rest of the process is
        measured. ``kvboost doctor`` estimates without loading the model. A draft and its KV come on top.
        """
        return estimate_engine(self.parts, self.session, context=context, batch=batch, stored_tokens=stored_tokens)

    # Adapters and weights

    def load_adapter(self, name: str, path_or_id: str, *, replace: bool = False, **load_kwargs: Any) -> str:
        """Load a PEFT adapter from a folder or the hub; returns the digest of its tensors, part of its KV's keys.

        It is not used until :meth:`set_adapter` or ``generate(adapter=name)`` selects it. ``replace`` overwrites a
        loaded one; everything else goes to PEFT. Waits for running requests.
        """
        return self.parts.owned_adapters().load(name, path_or_id, replace=replace, **load_kwargs)

    def set_adapter(self, name: str | None) -> None:
        """Use this adapter for requests without ``adapter``; None is the base model. Waits for running requests."""
        self.parts.owned_adapters().use(name)

    def weights_changed(self) -> None:
        """Invalidate cached digests after a change of weights that the engine cannot detect, and start trust again.

        PEFT's ``hotswap_adapter`` and writes through ``.data`` leave no trace in a tensor. Merges are detected.
        """
        self.parts.owned_adapters().weights_changed()
        if self.parts.runner.tiles is not None:
            self.parts.runner.tiles.weights_changed()
        self.allow_non_prefix_reuse()  # what checks have shown was of other weights

    def allow_non_prefix_reuse(self) -> None:
        """Reset the shadow checks' counts, and allow non-prefix reuse again if they had stopped it.

        With ``quality="auto"`` it starts the trial again instead: answers are exact until non-prefix reuse has earned
        its place anew, also if it had earned it, and what was kept in the cache directory is overwritten.
        """
        if self.session is not None:
            self.session.prefiller.approx.trust_again()

    # Holding

    def save_context(
        self, name: str, prompt: Prompt, *, boundaries: Sequence[int] = (), seconds: float | None = None
    ) -> Pin:
        """Read ``prompt``, store it, and hold it in memory for ``seconds``, or until :meth:`drop_context`.

        Prompts that begin with it then read what follows it only, whatever else is stored meanwhile. A name that is
        known is given to the new prompt. After a restart the same call finds the KV in a tier below the memory.
        Raises CapacityError where all contexts together would take more than half of the memory.
        """
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise ConfigError(f"seconds={seconds!r} is no time to hold a context; give a number above 0, or None")
        tokens = self.encode(prompt)
        with self._running(AS_SET):
            if self.session is not None:
                warm(self.session, tokens, boundaries=boundaries, clock=StageClock())
            return self.pins.add(self.session, tokens, boundaries=boundaries, name=name, seconds=seconds)

    def drop_context(self, name: str) -> bool:
        """Hold a context no longer. False if there is none of this name. What it stored is evicted in its turn."""
        found = next((pin for pin in self.contexts() if pin.name == name), None)
        return found is not None and self.pins.remove(found.id)

    def contexts(self) -> list[Pin]:
        """What :meth:`save_context` holds, oldest first."""
        tenant = self.session.tenant if self.session is not None else None
        return [pin for pin in self.pins.listed() if pin.tenant == tenant and pin.name is not None and not pin.client]

    # Removing

    def purge_tenant(self, tenant: str) -> None:
        """Remove everything stored for a tenant, of any model, from every tier. Let its requests finish first.

        Raises StoreError if a tier could not be reached. Other processes must purge their own memory.
        """
        root = self._root or self
        self.parts.check_purge()
        was_open = tenant == root.config.tenant or tenant in root._views
        view = root.for_tenant(tenant)
        view.clear()
        if not was_open:
            view.close()
        self.parts.purge(tenant)

    def purge_all(self) -> None:
        """Remove everything of every tenant, of any model, from every tier, also of tenants that are no more.

        Let requests finish first. Raises StoreError if a tier could not be reached. Other processes must purge their
        own memory.
        """
        self.parts.check_purge()
        for view in self.views():
            view.clear()
        self.parts.purge(None)

    def flush(self) -> None:
        """Return once everything stored so far is as durable as the tiers make it; of an engine, for all tenants."""
        if isinstance(self._store, TieredStore) and self._root is not None:
            self._store.flush(self._share)
        elif isinstance(self._store, LayeredStore):
            self._store.flush()

    def listen(self, listener: StoreListener) -> None:
        """Tell ``listener`` what is stored for all tenants, and from now on what is gained and lost.

        Only of tiers that know what they lose: the memory and this machine's disk. Raises ConfigError for a store of
        another kind.
        """
        if not isinstance(self._store, OwnStore):
            kind = type(self._store).__name__
            raise ConfigError(f"a {kind} does not tell what it stores; use a MemoryStore or a TieredStore")
        self._store.listen(listener)

    def clear(self) -> None:
        """Drop everything stored for this tenant, in every tier. A store passed to the engine is cleared as a whole."""
        if self._root is not None and not self.parts.owns_store:
            raise ConfigError("the store was given to the engine and is shared by all tenants; clear it there")
        self.pins.clear(tenant=self.session.tenant if self.session is not None else None)
        if self.session is not None:
            self.session.prefiller.approx.forget()  # first: a check must not store again what is cleared now
        if isinstance(self._store, OwnStore):
            self._store.clear(self._share)
        else:
            self._store.clear()
        self._served.clear()
        if self.session is not None:
            self.session.clear()

    def close(self) -> None:
        """Release the cache. The model stays usable, the engine does not. A store passed to it is left alone."""
        root = self._root or self
        with root._views_lock:
            if self._closed:
                return  # shared parts may be in use
            self._closed = True
        if self._root is None:
            for view in self.views()[1:]:
                view.close()
                view._released.wait()  # another thread may be closing it
            self.parts.close()
        try:
            self._release(self._share if self._root is not None else None)
        finally:
            with root._views_lock:
                root._views.pop(self.config.tenant, None)
            self._released.set()

    def _release(self, share: str | None) -> None:
        """Let go of the workspaces, and of a share of the engine's own store or all of it."""
        if self.session is not None:
            self.pins.clear(tenant=self.session.tenant)
            self.session.prefiller.pool.clear()
        if self.parts.owns_store and isinstance(self._store, OwnStore):
            self._store.close(share)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _running(self, adapter: AdapterName) -> AbstractContextManager[None]:
        self._check_open()
        return self.parts.running(adapter)

    def _check_open(self) -> None:
        if self._closed or self.parts.closed:
            raise ConfigError("this engine was closed; make a new one around the model")
