"""Time: of one request by stage, and what prefill and repair are expected to take, learnt from the requests.

The costs decide whether repositioning chunks is faster than computing. Invariants: no extra work is timed; a request's
own stages are observed once its first token exists, and on an asynchronous device once that has finished them; nobody
waits for it to find out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class StageClock:
    """Starts when made. ``lap(stage)`` adds the time since the last lap to ``stage``.

    With a ``mark`` a stage takes what the device took, once it has done it, and until then what asking for it took.
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: list[tuple[str, float, torch.Event | None, torch.Event | None]] = []
        """The stage, its milliseconds on the host, and where the device was before and after it."""
        self.mark: Callable[[], torch.Event | None] = lambda: None
        """Records an event of the device; None for one that never lags."""
        self.last_mark: torch.Event | None = None
        """Of the last lap."""

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to ``stage``."""
        now, mark = time.perf_counter(), self.mark()
        self._laps.append((stage, (now - self._last) * 1000.0, self.last_mark, mark))
        self._last, self.last_mark = now, mark

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the call."""
        return (time.perf_counter() - self._start) * 1000.0

    def stages(self) -> MappingProxyType[str, Any]:
        """Milliseconds by stage."""
        stages: dict[str, float] = {}
        for stage, milliseconds, before, after in self._laps:
            if before is not None and after is not None and before.query() and after.query():
                milliseconds = before.elapsed_time(after)
            stages[stage] = stages.get(stage, 0.0) + milliseconds
        return MappingProxyType(stages)


_DECAY = 0.98  # of earlier observations with each new one: about the last fifty count
_DEFAULT_FIXED_TOKENS = 32.0  # the fixed cost of a forward, in tokens, before anything was observed
_FIXED_TOKENS_RANGE = (4.0, 256.0)  # limits of the estimate: chunks of one size cannot separate forwards from tokens
_DEFAULT_REPAIR_FACTOR = 1.25  # time of a repair relative to plain steps with as many tokens
_REPAIR_FACTOR_RANGE = (0.25, 16.0)


class CostModel:
    """``seconds = per_token * (tokens + fixed_tokens * forwards)``, over recent requests, and a factor for repairs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ff = self._fr = self._rr = self._ft = self._rt = 0.0
        self._observed = 0
        self._place_seconds = self._placed_tokens = 0.0
        self._repair = _DEFAULT_REPAIR_FACTOR
        self._undone: deque[tuple[torch.Event | None, StageClock, Callable[[Mapping[str, float]], None]]] = deque()

    def observe_done(self, clock: StageClock, observe: Callable[[Mapping[str, float]], None]) -> None:
        """Hand a request's stages to ``observe`` once the device has done them: now, or when :meth:`settle` sees it."""
        self._undone.append((clock.last_mark, clock, observe))
        self.settle()

    def settle(self) -> None:
        """Observe what the device has done meanwhile, in order. Waits for nothing."""
        done = []
        with self._lock:
            while self._undone and ((mark := self._undone[0][0]) is None or mark.query()):
                done.append(self._undone.popleft())
        for _, clock, observe in done:
            observe(clock.stages())

    def observe_stages(self, stages: Mapping[str, float], *, forwards: int, tokens: int) -> None:
        """The stages of a prefill without repositioned chunks; one whose repair was dropped says nothing."""
        if "move" not in stages:
            seconds = (stages.get("prefill", 0.0) + stages["first_token"]) / 1000.0
            self.observe_prefill(forwards=forwards, tokens=tokens, seconds=seconds)

    def observe_prefill(self, *, forwards: int, tokens: int, seconds: float) -> None:
        """A prompt's missing tokens were computed in ``forwards`` forwards."""
        with self._lock:
            self._observed += 1
            if self._observed == 2:  # the first one loads kernels and allocates: it says nothing about the next
                self._ff = self._fr = self._rr = self._ft = self._rt = 0.0
            weight = (
                1.0 / max(seconds, 1e-6) ** 2
            )  # a relative error counts the same in a short prompt as in a long one
            self._ff = _DECAY * self._ff + weight * forwards * forwards
            self._fr = _DECAY * self._fr + weight * forwards * tokens
            self._rr = _DECAY * self._rr + weight * tokens * tokens
            self._ft = _DECAY * self._ft + weight * forwards * seconds
            self._rt = _DECAY * self._rt + weight * tokens * seconds

    def observe_reposition(self, *, tokens: int, seconds: float) -> None:
        """Chunks of ``tokens`` tokens were repositioned."""
        with self._lock:
            self._place_seconds = self._place_seconds * _DECAY + seconds
            self._placed_tokens = self._placed_tokens * _DECAY + tokens

    def observe_repair(self, *, expected: float, seconds: float) -> None:
        """A repair that was expected to take ``expected`` seconds took ``seconds``."""
        with self._lock:
            lowest, highest = _REPAIR_FACTOR_RANGE
            # At most twice the factor: one repair that something else delayed says little about the next.
            times = min(max(seconds / max(expected, 1e-9), lowest), highest, 2.0 * self._repair)
            self._repair += 0.2 * (times - self._repair)

    def repair_refused(self) -> None:
        """A repair was too expensive. Decay its factor a little, so that it is tried again later."""
        with self._lock:
            self._repair += 0.02 * (_DEFAULT_REPAIR_FACTOR - self._repair)

    def prefill_seconds(self, *, forwards: float, tokens: float) -> float:
        """Expected time of computing this; in units of one token before anything was observed."""
        with self._lock:
            fixed_tokens, per_token = self._solve()
            return per_token * (tokens + fixed_tokens * forwards)

    def tokens_within(self, seconds: float) -> int | None:
        """Tokens that one forward should compute in this time; None before more than a first, slow one was observed."""
        with self._lock:
            fixed_tokens, per_token = self._solve()
            return max(0, int(seconds / per_token - fixed_tokens)) if self._observed > 1 else None

    def reposition_seconds(self, tokens: int) -> float:
        """Expected time of repositioning ``tokens`` tokens."""
        with self._lock:
            return self._place_seconds / self._placed_tokens * tokens if self._placed_tokens else 0.0

    @property
    def in_seconds(self) -> bool:
        """Whether a prefill was observed, so that estimates are in seconds."""
        return self._rr > 0.0

    @property
    def repair_factor(self) -> float:
        """Time of a repair relative to plain steps with as many tokens."""
        with self._lock:
            return self._repair

    def _solve(self) -> tuple[float, float]:
        """The fixed cost of a forward in tokens, and seconds per token."""
        if not self._rr:
            return _DEFAULT_FIXED_TOKENS, 1.0
        fixed_tokens = _DEFAULT_FIXED_TOKENS
        determinant = self._ff * self._rr - self._fr * self._fr
        if determinant > 1e-3 * self._ff * self._rr:  # else all requests had nearly the same shape
            fixed = self._ft * self._rr - self._rt * self._fr
            per_token = self._rt * self._ff - self._ft * self._fr
            lowest, highest = _FIXED_TOKENS_RANGE
            fixed_tokens = highest if per_token <= 0.0 else min(max(fixed / per_token, lowest), highest)
        # With that fixed, the best-fitting seconds per token.
        squares = self._rr + 2.0 * fixed_tokens * self._fr + fixed_tokens**2 * self._ff
        return fixed_tokens, (self._rt + fixed_tokens * self._ft) / squares
