"""Answers a share of approximate requests both ways, off their path, and counts how often the answers differ.

Made by the engine where ``shadow_share`` asks for it. Invariants: no request waits for a check, though a check takes
its share of the machine; it stores nothing; checks that cannot keep up are dropped. The count feeds a bound that
holds at any time (:mod:`kvboost.approx.guard`); when it proves that too many answers differ, non-prefix reuse
switches itself off.
"""

from __future__ import annotations

import queue
import random
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from kvboost.approx.find import ApproxReuse
from kvboost.approx.guard import ReuseGuard
from kvboost.core.prefill import ChunkedPrompt
from kvboost.core.prefiller import Prefiller
from kvboost.hf.adapters import AS_SET, AdapterName
from kvboost.hf.runner import ModelRunner
from kvboost.types import KVBlock

FIRST_TOKENS = 8  # of an answer are compared: long enough to say something else, short enough to be cheap
_MAX_WAITING = 2  # each holds its blocks, beside the budget of the store


@dataclass(frozen=True)
class Answered:
    """A request that used repositioned chunks, and how it began to answer."""

    prompt: ChunkedPrompt
    blocks: Mapping[int, KVBlock]
    """What was repositioned, by the chunk's index."""
    produced: list[int]
    prefiller: Prefiller
    """Who prefilled it: of one tenant."""
    adapter: AdapterName = AS_SET
    """Of the request."""


def answers_differ(runner: ModelRunner, request: Answered) -> bool | None:
    """Whether non-prefix reuse prefers another token than a cold prefill, at any of the first tokens produced.

    Both prefill the prompt and the same tokens, whatever sampling chose. None if the chunks could not be placed again.
    """
    prefiller, prompt = request.prefiller, request.prompt
    if not prefiller.keys.is_current(prompt.snapshot):
        return None  # the model has changed since
    count = min(FIRST_TOKENS, len(request.produced))
    behind = request.produced[: count - 1]
    preferred = []
    for using in (request.blocks, None):
        with prefiller.open(prompt.tokens, boundaries=prompt.boundaries, new_tokens=count, using=using) as state:
            prefiller.advance_to_last_step(state)
            if using is not None and state.spans is None:
                return None
            rest = [*prompt.tokens[state.last_step :], *behind]
            preferred.append(runner.next_tokens(rest, state.cache, keep=count))
    return not torch.equal(*preferred)


def shadow_checks(
    prefiller: Prefiller, *, share: float, running: Callable[[AdapterName], AbstractContextManager[None]]
) -> ShadowChecks | None:
    """Checks of what ``prefiller``, and those of other tenants, reposition; None if they reposition nothing."""
    approx, runner = prefiller.approx, prefiller.runner
    if not isinstance(approx, ApproxReuse):
        return None
    assert isinstance(runner, ModelRunner)

    def check(request: Answered) -> bool | None:  # refers to no engine: a dropped one must not be kept alive by it
        with running(request.adapter):
            return answers_differ(runner, request)

    return ShadowChecks(check, share=share, guard=approx.guard)


class ShadowChecks:
    """Checks in a thread of their own."""

    def __init__(self, check: Callable[[Answered], bool | None], *, share: float, guard: ReuseGuard) -> None:
        """``check`` says whether the answers differ, None if it cannot tell; ``guard`` counts."""
        self._check, self._share, self._guard = check, share, guard
        self._chance = random.Random()
        self._closed = False
        self._waiting: queue.Queue[Answered | None] = queue.Queue(maxsize=_MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="kvboost-shadow", daemon=True)
        self._thread.start()
        self.dropped = 0

    def offer(self, request: Answered) -> None:
        """Perhaps check this request."""
        if self._closed or not request.produced or not self._guard.allowed or self._chance.random() >= self._share:
            return
        try:
            self._waiting.put_nowait(request)
        except queue.Full:
            self.dropped += 1  # requests come faster than checks: a smaller share is checked, still by chance

    def wait(self) -> None:
        """Until every check offered so far is done."""
        self._waiting.join()

    def close(self) -> None:
        """Finish the check that runs, drop the others, end the thread."""
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Take no more requests, drop those that wait, and let the thread end by itself."""
        self._closed = True
        while True:
            try:
                self._waiting.get_nowait()
                self._waiting.task_done()
            except queue.Empty:
                break
        self._waiting.put(None)

    def _work(self) -> None:
        while True:
            request = self._waiting.get()
            try:
                if request is None:
                    return
                self._judge(request)
            except Warning:
                pass  # the user turned warnings into errors; what they say also stands in cache_stats()
            finally:
                self._waiting.task_done()

    def _judge(self, request: Answered) -> None:
        try:
            differ = self._check(request)
        except Exception as error:  # noqa: BLE001 - a check nobody waits for must not end the thread
            warnings.warn(f"a shadow check failed and does not count: {error!r}", RuntimeWarning, stacklevel=1)
            return
        if differ is None or not self._guard.allowed:
            return
        self._guard.observe(differ)
        if (reason := self._guard.reason) is not None:
            warnings.warn(f"non-prefix reuse is off from here on: {reason}", RuntimeWarning, stacklevel=1)
