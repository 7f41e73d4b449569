"""The scheduler's side: finds out what is stored, claims what the worker holds, and says what to keep.

Runs in the process of vLLM's scheduler, which has no KV. A request goes through: looking (is anything of it stored?),
fetching (the worker brings it up), held, and done (claimed, or nothing to claim). Invariants: only what the worker
holds is claimed; a request with nothing stored is not delayed by the worker; no request waits longer than
``_PATIENCE_S`` for what is stored.
"""

from __future__ import annotations

import enum
import itertools
import logging
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from kvboost.core.guarded import GuardedStore
from kvboost.core.keys import PromptKeys
from kvboost.integrations.vllm.messages import IDLE_S, Fetch, Load, Orders, Report, Save
from kvboost.integrations.vllm.page_events import PageEvent, PageEvents
from kvboost.integrations.vllm.setup import Setup, mode_of
from kvboost.types import Chunk, context_before

_LOOKUPS = 4
_PATIENCE_S = 10.0  # then it is computed: a tier may hang
_MAX_KNOWN = 2**20  # keys of stored chunks that are remembered
_LEAST_MOVED = 0.5  # of the tokens behind the exact ones: with more gaps than that, computing is no slower


_log = logging.getLogger(__name__)


class _State(enum.Enum):
    LOOKING = enum.auto()
    FETCHING = enum.auto()
    HELD = enum.auto()
    DONE = enum.auto()
    """Claimed, or nothing to claim."""


@dataclass
class _Tracked:
    """One request of vLLM's."""

    request: Any
    keys: PromptKeys
    state: _State = _State.LOOKING
    found: Future[list[Chunk]] | None = None
    deadline: float | None = None
    """From when vLLM first asks: until then a request may have queued for long."""
    fetch: int = -1
    wanted: list[Chunk] = field(default_factory=list)
    held: int = 0
    moved: list[int] = field(default_factory=list)
    anywhere: bool = False
    apart: bool = False
    """Some of its KV is approximate: nobody else may use its pages, and none of it is kept."""
    local: int = 0
    """Tokens that vLLM has by itself, when it was last asked."""
    started: bool = False
    """It has taken part in a step since it was looked for."""
    pages: list[int] = field(default_factory=list)
    kept: int = 0
    """Tokens up to here are stored, or were offered."""
    cut_at: int = 0
    """No chunk ends before this many tokens are computed."""
    tail_kept: bool = False
    offered_again: bool = False


class SchedulerSide:
    """Everything the connector does in the scheduler. Used from its one thread; only lookups are in another."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._store = setup.open(memory=False) if setup.has_tiers else None
        self._guarded = GuardedStore(self._store) if self._store is not None else None
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="kvboost-lookup")
        self._requests: dict[str, _Tracked] = {}
        self._known: dict[bytes, None] = {}
        """Keys that the worker has stored, oldest first. It may have evicted some: then a fetch finds less."""
        self._contents: dict[bytes, None] = {}
        """The same for texts, wherever they stood."""
        self._orders = Orders()
        self._fetches: dict[int, _Tracked] = {}
        """Those under way."""
        self._numbers = itertools.count()
        self._failures = 0
        self._is_off = False
        self._events = PageEvents(setup.block_size) if setup.has_events else None

    # What vLLM asks

    def arrived(self, request: Any) -> None:
        """A request is new: begin to look for it."""
        mode = "off" if self._is_off else mode_of(request, self._setup.settings.mode)
        keys = self._setup.keys.of(request.cache_salt, request.lora_request) if mode != "off" else None
        if keys is not None:
            tracked = self._requests[request.request_id] = _Tracked(request, keys)
            tracked.anywhere = mode == "approximate" and request.lora_request is None
            self._look(tracked)

    def matched(self, request: Any, local: int) -> int | None:
        """How many tokens after the first ``local`` ones can be loaded; None: not known yet."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            return 0  # such a request is not asked again, whatever the answer
        if tracked.started:
            self._look(tracked)  # it was preempted: its pages are gone
        tracked.local = local
        if tracked.deadline is None:
            tracked.deadline = time.monotonic() + _PATIENCE_S
        if tracked.state is _State.LOOKING:
            self._found(tracked)
        if tracked.state in (_State.LOOKING, _State.FETCHING):
            if time.monotonic() <= tracked.deadline:
                return None
            _log.warning("kvboost: stored KV did not come within %.0f s; the request is computed", _PATIENCE_S)
            self._done(tracked)
        if tracked.state is _State.HELD:
            claim = self._whole_pages(tracked, self._held_end(tracked, local)) - local
            if claim > 0:
                if tracked.moved and not tracked.apart:
                    tracked.apart = True
                    set_apart(request)
                return claim
            self._done(tracked)
        return 0

    def allocated(self, request: Any, pages: Sequence[int], loaded: int) -> None:
        """vLLM has given pages to a request and will have ``loaded`` tokens written into them."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if loaded and tracked.state is _State.HELD:
            end = tracked.local + loaded
            tokens = list(request.all_token_ids[:end]) if tracked.moved else []
            self._orders.loads.append(Load(tracked.fetch, tracked.local, end, list(pages), tokens))
            tracked.state = _State.DONE
        else:
            self._done(tracked)

    def reset(self) -> None:
        """The server's weights may be others now: find nothing of before, and leave lasting tiers alone.

        Nobody could find again what is written there under the name of unknown weights.
        """
        if self._setup.has_tiers and not self._is_off:
            self._is_off = True
            _log.warning("kvboost: the cache was reset, so the weights may be others; reuse is off until a restart")
        self._setup.keys.renew()
        self._known.clear()
        self._contents.clear()
        for tracked in self._requests.values():
            self._done(tracked)
        self._requests.clear()  # what they compute has keys of before: none of it is kept
        if self._events is not None:
            self._events.clear()

    def orders(self, output: Any) -> Orders:
        """What the worker shall do in this step."""
        for new in output.scheduled_new_reqs:
            self._scheduled(new.req_id, new.block_ids, computed=new.num_computed_tokens, output=output, anew=True)
        cached = output.scheduled_cached_reqs
        for request, pages, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._scheduled(request, pages, computed=computed, output=output, anew=request in cached.resumed_req_ids)
        orders, self._orders = self._orders, Orders()
        orders.failures = self._failures
        idle = self._setup.may_wait and not output.total_num_scheduled_tokens
        orders.idle = idle and not self._await_lookup()
        return orders

    def _await_lookup(self) -> bool:
        """Wait a moment for a lookup; False if none is under way.

        vLLM asks again at once. Without a wait, its loop would leave our threads no time to run.
        """
        looking = [t.found for t in self._requests.values() if t.state is _State.LOOKING and t.found is not None]
        if looking:
            wait(looking, timeout=IDLE_S, return_when=FIRST_COMPLETED)
        return bool(looking)

    def learn(self, report: Report) -> None:
        """Take note of what the worker has done."""
        if report.failures:
            self._failures += report.failures
            for each in self._requests.values():  # what was offered since may have been dropped
                each.kept, each.cut_at, each.tail_kept = 0, 0, False
        if self._events is not None:
            self._events.apply(report.changes)
        for key, content in report.stored:
            self._known[key] = None
            self._contents[content] = None
        for known in (self._known, self._contents):
            while len(known) > _MAX_KNOWN:
                del known[next(iter(known))]
        for request in report.refused:
            self._offer_again(request)
        for number, held in report.held.items():
            tracked = self._fetches.pop(number, None)
            if tracked is not None:
                tracked.held, tracked.moved, tracked.state = held, report.moved.get(number, []), _State.HELD
                self._correct(tracked)

    def _correct(self, tracked: _Tracked) -> None:
        """Remember what a fetch found, and forget the rest: it was evicted, or belonged to a server that is gone."""
        found, missed = tracked.wanted[: tracked.held], tracked.wanted[tracked.held :]
        self._known.update(dict.fromkeys(chunk.prefix_key for chunk in found))
        for index, chunk in enumerate(missed, tracked.held):
            self._known.pop(chunk.prefix_key, None)
            if tracked.anywhere and index not in tracked.moved:
                self._contents.pop(chunk.content_key, None)

    def _offer_again(self, request: str) -> None:
        """Offer all chunks of a request once more. The store may have evicted some that vLLM still has in its pages.

        Nobody looks such chunks up, so nobody would notice.
        """
        tracked = self._requests.get(request)
        if tracked is None or tracked.offered_again:
            return
        tracked.offered_again = True
        for chunk in tracked.keys.chunks(tracked.keys.snapshot().root, list(tracked.request.all_token_ids), ()):
            self._known.pop(chunk.prefix_key, None)
        tracked.kept, tracked.cut_at, tracked.tail_kept = 0, 0, False

    def finished(self, request: Any) -> None:
        """A request has ended, however."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None:
            self._done(tracked)

    def take_events(self) -> list[PageEvent]:
        """Pages that the worker's tiers have gained and lost since the last call."""
        return self._events.drain() if self._events is not None else []

    def close(self) -> None:
        """Close what was opened to look."""
        self._lookups.shutdown(cancel_futures=True)
        if self._store is not None:
            self._store.close()

    # Looking

    def _look(self, tracked: _Tracked) -> None:
        self._done(tracked)
        tracked.state, tracked.held, tracked.moved, tracked.started = _State.LOOKING, 0, [], False
        tracked.deadline = None
        tokens = list(tracked.request.all_token_ids)
        if self._guarded is None:
            tracked.found = Future()
            tracked.found.set_result(self._find(tracked.keys, tokens, asks=False, anywhere=tracked.anywhere))
        else:
            tracked.found = self._lookups.submit(self._find, tracked.keys, tokens, asks=True, anywhere=tracked.anywhere)

    def _found(self, tracked: _Tracked) -> None:
        """If the lookup is over, have the worker fetch what it found."""
        assert tracked.found is not None
        if not tracked.found.done():
            return
        if (error := tracked.found.exception()) is not None:
            _log.warning("kvboost: looking for stored KV failed; the request is computed", exc_info=error)
            self._done(tracked)
            return
        tracked.wanted = tracked.found.result()
        if self._whole_pages(tracked, tracked.wanted[-1].end if tracked.wanted else 0) <= tracked.local:
            self._done(tracked)
            return
        tracked.state, tracked.fetch = _State.FETCHING, next(self._numbers)
        self._fetches[tracked.fetch] = tracked
        if self._events is not None and not tracked.apart:
            self._events.describe(tracked.request, tracked.wanted)
        self._orders.fetches.append(Fetch(tracked.fetch, tracked.wanted, tracked.anywhere))

    def _find(self, keys: PromptKeys, tokens: list[int], *, asks: bool, anywhere: bool) -> list[Chunk]:
        """The leading chunks that are probably stored, and the end of an earlier prompt behind them.

        With ``anywhere`` all chunks, if some behind the leading ones may be stored as well.
        """
        root = keys.snapshot().root
        chunks = [chunk for chunk in keys.chunks(root, tokens, ()) if chunk.end < len(tokens)]
        run = self._run(chunks, asks=asks)
        # The tiers are not asked for texts here: the worker finds out when it fetches.
        if anywhere and run < len(chunks) and (asks or any(c.content_key in self._contents for c in chunks[run:])):
            return chunks
        size = self._setup.block_size
        behind = chunks[run - 1] if run else None
        for tail in keys.tails(root, tokens, behind=behind):
            if tail.end % size == 0 and self._run([tail], asks=asks):
                return [*chunks[:run], tail]
        return chunks[:run]

    def _run(self, chunks: Sequence[Chunk], *, asks: bool) -> int:
        known = next((i for i, chunk in enumerate(chunks) if chunk.prefix_key not in self._known), len(chunks))
        if asks and known < len(chunks):
            assert self._guarded is not None
            known += self._guarded.leading_run(chunks[known:])
        return known

    def _whole_pages(self, tracked: _Tracked, end: int) -> int:
        """Tokens in whole pages up to ``end``; the last token is always computed."""
        size = self._setup.block_size
        return min(end, int(tracked.request.num_tokens) - 1) // size * size

    def _held_end(self, tracked: _Tracked, local: int) -> int:
        """Up to where a request is claimed: the last chunk that is held, if enough before it is held too."""
        exact = tracked.wanted[tracked.held - 1].end if tracked.held else 0
        if not tracked.moved:
            return exact
        end = tracked.wanted[tracked.moved[-1]].end
        found = sum(tracked.wanted[index].end - tracked.wanted[index].start for index in tracked.moved)
        # What vLLM has by itself and is not held is computed once more, as a gap: its pages may not be ready yet.
        if found >= _LEAST_MOVED * (end - exact) and self._whole_pages(tracked, end) > max(exact, local):
            return end
        tracked.moved = []
        return exact

    def _done(self, tracked: _Tracked) -> None:
        """Nothing is claimed any more; what is held, or will be, is let go of."""
        if tracked.state in (_State.FETCHING, _State.HELD):
            self._orders.releases.append(tracked.fetch)
            self._fetches.pop(tracked.fetch, None)
        elif tracked.state is _State.LOOKING and tracked.found is not None:
            tracked.found.cancel()
        tracked.state = _State.DONE

    # Keeping

    def _scheduled(self, request_id: str, pages: Any, *, computed: int, output: Any, anew: bool) -> None:
        """A request takes part in this step: keep the chunks that are complete after it."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        tracked.started = True
        if tracked.apart:
            return
        new = list(pages[0]) if pages is not None else []
        if anew:
            tracked.pages = new
        else:
            tracked.pages.extend(new)
        tokens = tracked.request.all_token_ids
        # Draft tokens may be rejected: only tokens that are known count.
        ready = min(computed + output.num_scheduled_tokens[request_id], len(tokens))
        prompt_read = ready >= tracked.request.num_prompt_tokens and not tracked.tail_kept
        if ready < tracked.cut_at and not prompt_read:
            return
        chunks = self._new_chunks(tracked, list(tokens[:ready]), with_tail=prompt_read)
        tracked.cut_at = ready + self._setup.settings.engine.chunk_tokens  # not at every token: all of it is cut again
        tracked.tail_kept = tracked.tail_kept or prompt_read
        if chunks:
            size = self._setup.block_size
            # The end of a prompt may begin before a chunk that ends behind it.
            first = min(chunk.start for chunk, _ in chunks) // size
            last = -(-max(chunk.end for chunk, _ in chunks) // size)
            parts, contexts = [chunk for chunk, _ in chunks], [context for _, context in chunks]
            if self._events is not None:
                self._events.describe(tracked.request, parts)
            self._orders.saves.append(Save(request_id, parts, contexts, first, tracked.pages[first:last]))

    def _new_chunks(self, tracked: _Tracked, tokens: list[int], *, with_tail: bool) -> list[tuple[Chunk, bytes]]:
        """The complete chunks that are not stored yet, with their contexts; at a prompt's end also its last pages."""
        keys, size = tracked.keys, self._setup.block_size
        root = keys.snapshot().root
        chunks = keys.chunks(root, tokens, ())
        new = [
            (chunk, context_before(chunks, index))
            for index, chunk in enumerate(chunks)
            if chunk.end > tracked.kept and chunk.prefix_key not in self._known
        ]
        tracked.kept = chunks[-1].end if chunks else 0
        if with_tail:
            whole = min(tracked.request.num_prompt_tokens, len(tokens)) // size * size
            before, tail = keys.chunks_and_tail(root, tokens[:whole], ())
            if tail is not None and tail.prefix_key not in self._known:
                new.append((tail, context_before([*before, tail], len(before))))
        return new


def set_apart(request: Any) -> None:
    """Give a request's further pages names that no other request has.

    vLLM names pages by their tokens and shares them by name. Pages with approximate KV, and those computed behind
    them, would be served to others as exact.
    """
    request.cache_salt = f"kvboost-{uuid.uuid4()}"
    request.block_hashes.clear()
    request.update_block_hashes()
