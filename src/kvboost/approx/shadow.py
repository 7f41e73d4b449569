"""Answers requests both ways, in the background, and counts how often the answers differ.

Made by the engine: for ``shadow_share``, to check that share of approximate requests, or for reuse that must be earned,
to check in idle time those that could have been approximate. Invariants: no request waits for a check to end; a check
in idle time ends when a request comes, between two steps; at most three requests hold blocks for a check; they are
chosen when they begin, so not by their answers' lengths.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from kvboost.approx.find import ApproxReuse
from kvboost.approx.guard import ReuseGuard
from kvboost.core.prefill import Prefiller, RequestCancelled
from kvboost.core.spans import ApproxSpans
from kvboost.core.state import ChunkedPrompt
from kvboost.hf.adapters import AS_SET, AdapterName
from kvboost.hf.runner import ModelRunner

FIRST_TOKENS = 8  # compared per answer: enough to diverge, few enough to be cheap
_SLOTS = 3  # each holds its blocks, outside the store's budget
_MAX_TRIES = 20  # of a check that requests interrupt: others wait for its slot
_LOOK_S = 0.05  # how often a check that waits for an idle moment looks for one

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedRequest:
    """A finished request that used repositioned chunks, or could have."""

    prompt: ChunkedPrompt
    spans: ApproxSpans
    """What was or could have been repositioned. Without a slot it is not to be checked."""
    produced: list[int]
    """The generated tokens."""
    prefiller: Prefiller
    """The prefiller of its tenant."""
    adapter: AdapterName = AS_SET
    """The adapter it ran with."""
    cleared: int = 0
    """How often its tenant's store had been cleared when it ended."""

    @classmethod
    def of(
        cls,
        prompt: ChunkedPrompt,
        spans: ApproxSpans,
        produced: Sequence[int],
        prefiller: Prefiller,
        adapter: AdapterName,
    ) -> ServedRequest:
        """A request that ends now."""
        assert isinstance(prefiller.approx, ApproxReuse)
        return cls(prompt, spans, list(produced), prefiller, adapter, prefiller.approx.cleared)


def answers_differ(
    runner: ModelRunner, request: ServedRequest, *, idle: Callable[[], bool] | None = None
) -> bool | None:
    """Whether the most likely token differs from a full prefill's at any of the first generated tokens.

    Both runs prefill the prompt and the same generated tokens. None if the chunks could not be moved again. With
    ``idle``, the full prefill is stored, so that the prompt is exact next time; RequestCancelled if a request came
    meanwhile, and what was computed until then is stored, so that the next try goes on there.
    """
    prefiller, prompt, approx = request.prefiller, request.prompt, request.prefiller.approx
    assert isinstance(approx, ApproxReuse)
    changed = not prefiller.keys.is_current(prompt.snapshot) or approx.cleared != request.cleared
    if changed or approx.guard.standing.rung != request.spans.rung:
        return None
    count = min(FIRST_TOKENS, len(request.produced))
    generated = request.produced[: count - 1]
    preferred = []

    def busy() -> bool:
        return idle is not None and not idle()

    for using in (request.spans.blocks, None):
        with prefiller.store.uncounted():  # no request looks for these
            again = prefiller.open if using is None else partial(prefiller.replay, using=using)
            state = again(prompt.tokens, boundaries=prompt.boundaries, new_tokens=count)
        with state:
            try:
                prefiller.advance_to_last_step(state, cancelled=busy)
                if using is None and idle is not None:
                    prefiller.advance(state, to=max(state.last_step, len(prompt.tokens) - 1), cancelled=busy)
            finally:
                if using is None and idle is not None:
                    approx.commit_unless_cleared(prefiller, state, cleared=request.cleared)
            if using is not None and state.spans is None:
                return None
            rest = [*prompt.tokens[state.num_computed :], *generated]
            preferred.append(runner.last_logits(rest, state.cache, keep=count).argmax(dim=-1))
    return not torch.equal(*preferred)


def shadow_checks(
    prefiller: Prefiller,
    *,
    share: float,
    running: Callable[[AdapterName], AbstractContextManager[None]],
    idle: Callable[[], bool] | None,
) -> ShadowChecks | None:
    """Checks for ``prefiller`` and those of other tenants, with ``idle`` only while it says so.

    None without non-prefix reuse.
    """
    approx, runner = prefiller.approx, prefiller.runner
    if not isinstance(approx, ApproxReuse):
        return None
    assert isinstance(runner, ModelRunner)

    def check(request: ServedRequest) -> bool | None:  # holds no engine reference, so a dropped engine can be freed
        with running(request.adapter):
            return answers_differ(runner, request, idle=idle)

    return ShadowChecks(check, share=share, guard=approx.guard, idle=idle)


class ShadowChecks:
    """Runs checks in a background thread."""

    def __init__(
        self,
        check: Callable[[ServedRequest], bool | None],
        *,
        share: float,
        guard: ReuseGuard,
        idle: Callable[[], bool] | None = None,
    ) -> None:
        """``check`` returns whether the answers differ, None if unknown; ``guard`` counts.

        It raises RequestCancelled if a request came and it is to be tried again.
        """
        self._check, self._share, self._guard = check, share, guard
        self._slots = CheckSlots(_SLOTS)
        guard.chooses = lambda: self._random.random() < self._share
        guard.has_slot, guard.reserve = lambda: self._slots.any_free, self._reserve
        self._idle = idle or (lambda: True)
        self._random = random.Random()
        self._closed = False
        self._queued: queue.Queue[ServedRequest | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="kvboost-shadow", daemon=True)
        self._thread.start()
        self.dropped = 0

    def _reserve(self) -> ReservedSlot | None:
        """A slot for a request that found something to reposition."""
        slot = self._slots.reserve()
        self.dropped += slot is None  # checks cannot keep up: those in calm moments count for more
        return slot

    def offer(self, request: ServedRequest) -> None:
        """Queue this request for a check, if it was given a slot when it began."""
        standing = self._guard.standing
        if request.spans.slot is None:
            return
        if self._closed or not request.produced or not (standing.allowed or standing.trying):
            request.spans.slot.release()
        else:
            self._queued.put(request)

    def wait(self) -> None:
        """Return once every queued check is done."""
        self._queued.join()

    def close(self) -> None:
        """Finish the running check, drop the queued ones, and join the thread."""
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Accept no more requests, drop the queued ones, and let the thread end."""
        self._closed = True
        while True:
            try:
                self._queued.get_nowait()
                self._queued.task_done()
            except queue.Empty:
                break
        self._queued.put(None)

    def _work(self) -> None:
        while True:
            request = self._queued.get()
            try:
                if request is None:
                    return
                self._try(request)
            except Warning:
                pass  # the user turned warnings into errors; cache_stats() has the same information
            finally:
                if request is not None and request.spans.slot is not None:
                    request.spans.slot.release()
                self._queued.task_done()

    def _try(self, request: ServedRequest) -> None:
        """Check it in the next idle moment, and again in later ones if requests interrupt it."""
        for _ in range(_MAX_TRIES):
            while not self._idle() and not self._closed:
                time.sleep(_LOOK_S)
            if self._closed:
                return
            try:
                return self._judge(request)
            except RequestCancelled:
                continue
        self.dropped += 1

    def _judge(self, request: ServedRequest) -> None:
        try:
            differ = self._check(request)
        except RequestCancelled:
            raise
        except Exception as error:  # noqa: BLE001 - a failed check must not end the thread
            warnings.warn(f"a shadow check failed and does not count: {error!r}", RuntimeWarning, stacklevel=1)
            return
        before = self._guard.allowed
        if differ is None or not (before or self._guard.standing.trying):
            return
        self._guard.observe(differ, rung=request.spans.rung)
        if before and (reason := self._guard.reason) is not None:
            warnings.warn(f"non-prefix reuse is now off: {reason}", RuntimeWarning, stacklevel=1)
        elif not before and self._guard.allowed:
            logger.info("non-prefix reuse is now on: checks have shown that it changes few enough answers")


class CheckSlots:
    """So many requests may be on trial, wait for a check, or be checked at a time. Thread-safe.

    A slot is reserved when a request begins, and is free once its check is over. Reserved at the end of a request, it
    would go to the shortest answers first, and the requests before that would hold their blocks without a limit.
    """

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._free = count

    @property
    def any_free(self) -> bool:
        """Whether one could be reserved now."""
        return self._free > 0

    def reserve(self) -> ReservedSlot | None:
        """A slot, or None if all are reserved."""
        with self._lock:
            if self._free == 0:
                return None
            self._free -= 1
            return ReservedSlot(self)

    def _release(self, slot: ReservedSlot) -> None:
        with self._lock:
            self._free += slot.held
            slot.held = False


class ReservedSlot:
    """One of the slots."""

    def __init__(self, slots: CheckSlots) -> None:
        self._slots = slots
        self.held = True

    def release(self) -> None:
        """Leave it to another request. Harmless the second time."""
        self._slots._release(self)
