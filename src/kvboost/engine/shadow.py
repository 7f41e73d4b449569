"""Answers a share of moved requests both ways, off their path, and counts how often the answers differ.

Made by the engine where ``shadow_share`` asks for it. Invariants: a check delays no request and stores nothing;
a check that cannot keep up is dropped, not queued without end. The count feeds a bound that holds at any
time (:mod:`kvboost.repair.bound`); when it proves too many answers differ, moved reuse switches itself off.
"""

from __future__ import annotations

import queue
import random
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvboost.engine.clock import StageClock
from kvboost.engine.reader import PromptReader
from kvboost.model import ModelRunner
from kvboost.repair import ReuseGuard

FIRST_TOKENS = 8  # of an answer are compared: long enough to say something else, short enough to be cheap
_MOST_WAITING = 8


@dataclass(frozen=True)
class _Check:
    tokens: list[int]
    boundaries: Sequence[int]
    produced: list[int]


def answers_differ(
    runner: ModelRunner, reader: PromptReader, tokens: list[int], boundaries: Sequence[int], produced: Sequence[int]
) -> bool | None:
    """Whether moved reuse prefers another token than a full reading, at any of the first tokens produced.

    Both read the prompt and then the same tokens, whatever sampling chose. None if nothing is moved this time.
    """
    behind = list(produced[: FIRST_TOKENS - 1])
    keep = len(behind) + 1
    with reader.open(
        tokens, boundaries=boundaries, new_rows=len(behind), clock=StageClock(), move=True, at_any_price=True
    ) as reading:
        if reading.moved is None:
            return None
        reader.advance_to_last_step(reading)
        rest = [*tokens[reading.plan.steps[-1].start :], *behind]
        moved = runner.next_tokens(rest, reading.cache, keep=keep)
    return not torch.equal(moved, runner.next_tokens([*tokens, *behind], None, keep=keep))


class ShadowChecks:
    """Checks in a thread of their own."""

    def __init__(
        self, check: Callable[[list[int], Sequence[int], list[int]], bool | None], *, share: float, guard: ReuseGuard
    ) -> None:
        self._check, self._share, self._guard = check, share, guard
        self._chance = random.Random()
        self._waiting: queue.Queue[_Check | None] = queue.Queue(maxsize=_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="kvboost-shadow", daemon=True)
        self._thread.start()
        self.dropped = 0

    def offer(self, tokens: list[int], boundaries: Sequence[int], produced: Sequence[int]) -> None:
        """Perhaps check this request, which used moved chunks."""
        if not produced or not self._guard.allowed or self._chance.random() >= self._share:
            return
        try:
            self._waiting.put_nowait(_Check(tokens, boundaries, list(produced)))
        except queue.Full:
            self.dropped += 1  # requests come faster than checks: a smaller share is checked, still by chance

    def wait(self) -> None:
        """Until every check offered so far is done."""
        self._waiting.join()

    def close(self) -> None:
        """Finish the check that runs, drop the others, end the thread."""
        while True:
            try:
                self._waiting.get_nowait()
                self._waiting.task_done()
            except queue.Empty:
                break
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            item = self._waiting.get()
            try:
                if item is None:
                    return
                self._judge(item)
            finally:
                self._waiting.task_done()

    def _judge(self, item: _Check) -> None:
        try:
            differ = self._check(item.tokens, item.boundaries, item.produced)
        except Exception as error:  # noqa: BLE001 - a check nobody waits for must not end the thread
            warnings.warn(f"a shadow check failed and does not count: {error!r}", RuntimeWarning, stacklevel=1)
            return
        if differ is None or not self._guard.allowed:
            return
        self._guard.observe(differ)
        if (reason := self._guard.reason) is not None:
            warnings.warn(f"moved reuse is off from here on: {reason}", RuntimeWarning, stacklevel=1)
