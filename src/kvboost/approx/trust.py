"""Non-prefix reuse that must prove itself first: exact answers until checks have bounded the share that would change.

Used instead of :class:`kvboost.approx.guard.ReuseGuard` with ``quality="auto"``. Repairs are tried one after another,
cheapest first, on requests that are answered exactly. Invariant: no repair is chosen for a request before its upper
bound was below the tolerated share, and none any longer once its lower bound is above it. What checks have shown may be
kept for the next process (:class:`TrustFile`): the bounds are valid over its checks and these together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost.approx.guard import DisagreementBound, Standing

if TYPE_CHECKING:
    from kvboost.core.spans import CheckSlot

_MAX_CHECKS = 400  # a repair whose share lies next to the tolerated one would be tried forever
_RECENT = 200  # checks of a repair in use that are also judged by themselves: a good past must not hide a bad present


@dataclass(frozen=True)
class TrustState:
    """How far the trial is."""

    rung: int = 0
    earned: bool = False
    checked: int = 0
    differed: int = 0
    recent_checked: int = 0
    """Of the latest checks of a repair in use, which are also judged by themselves."""
    recent_differed: int = 0


class EarnedTrust:
    """Tries repairs in order and allows the first that is proven good enough. Thread-safe.

    With probability ``confidence``, no repair is ever allowed whose share of changed answers, if it stays the same
    from check to check, is above ``tolerated``: each of the repairs gets its part of the error.
    """

    def __init__(
        self, tolerated: float, *, repairs: Sequence[str], confidence: float = 0.95, keeper: TrustFile | None = None
    ) -> None:
        """``repairs`` are their names, in the order they are tried."""
        self._tolerated, self._names = tolerated, tuple(repairs)
        self._confidence = 1.0 - (1.0 - confidence) / len(self._names)
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        """Held, before the other one, by who changes the state: states are kept in the order in which they came."""
        self.has_slot: Callable[[], bool] = lambda: False
        """Whether another request could be checked; set by who checks. If not, none is put on trial."""
        self.reserve: Callable[[], CheckSlot | None] = lambda: None
        """A slot for a request that begins, if it is one of those to check; set by who checks."""
        self._keeper = keeper
        self._bound = self._recent = DisagreementBound(self._confidence)
        self._resume((keeper.load() if keeper is not None else None) or TrustState())

    @property
    def standing(self) -> Standing:
        """Whether reuse is earned or on trial, and with which repair; the last one after all have failed."""
        with self._lock:
            trying = not self._earned and self._rung < len(self._names)
            return Standing(self._earned, trying, min(self._rung, len(self._names) - 1))

    @property
    def allowed(self) -> bool:
        """Whether non-prefix reuse has earned its place."""
        return self.standing.allowed

    @property
    def bound(self) -> DisagreementBound:
        """A copy of the counts and bounds of the repair that is tried or in use."""
        with self._lock:
            return replace(self._bound)

    def observe(self, disagreed: bool, *, rung: int = 0) -> None:
        """Count one request checked with the repair ``rung``; may allow, end or change the repair."""
        with self._saving:
            state = self._count(disagreed, rung)
            if state is not None:
                self._keep(state)

    def _count(self, disagreed: bool, rung: int) -> TrustState | None:
        """The state after this check; None if it does not count."""
        with self._lock:
            if self._rung != rung:
                return None  # the check began before its repair was given up
            self._bound.observe(disagreed)
            if self._earned:
                self._recent.observe(disagreed)
            if self._is_worse(self._bound) or (self._earned and self._is_worse(self._recent)):
                self._start(rung + 1)
            elif self._earned:
                if self._recent.checked >= _RECENT:
                    self._recent = DisagreementBound(self._confidence)
            elif self._bound.excludes(self._tolerated):
                self._start(rung, earned=True)
            elif self._bound.checked >= _MAX_CHECKS:
                self._start(rung + 1)
            return self._state()

    def _is_worse(self, bound: DisagreementBound) -> bool:
        return bound.disagreements > self._tolerated * bound.checked and bound.excludes(self._tolerated)

    def _start(self, rung: int, *, earned: bool = False) -> None:
        self._resume(TrustState(rung, earned))

    def _resume(self, state: TrustState) -> None:
        self._rung = min(state.rung, len(self._names))
        self._earned = state.earned and self._rung < len(self._names)
        self._bound = DisagreementBound(self._confidence, checked=state.checked, disagreements=state.differed)
        self._recent = DisagreementBound(
            self._confidence, checked=state.recent_checked, disagreements=state.recent_differed
        )

    def _state(self) -> TrustState:
        bound, recent = self._bound, self._recent
        counts = bound.checked, bound.disagreements, recent.checked, recent.disagreements
        return TrustState(self._rung, self._earned, *counts)

    def _keep(self, state: TrustState, *, anew: bool = False) -> None:
        """Not in the lock that requests wait for."""
        if self._keeper is not None:
            self._keeper.save(state, anew=anew)

    def reset(self) -> None:
        """Start again with the first repair: what was earned is lost, also for the next process."""
        with self._saving:
            with self._lock:
                self._start(0)
                state = self._state()
            self._keep(state, anew=True)

    @property
    def reason(self) -> str | None:
        """Where the trial stands; None once it is passed."""
        with self._lock:
            if self._earned:
                return None
            if self._rung == len(self._names):
                return (
                    f"exact only: {' and '.join(self._names)} changed more than {self._tolerated:.3g} of the checked "
                    "answers, or could not be told apart from it; tolerate more with a number as quality, or try again "
                    "with allow_non_prefix_reuse()"
                )
            bound = self._bound
            return (
                f"exact only: {bound.checked} of about {self._needed()} checks of {self._names[self._rung]!r} done, "
                f"{bound.disagreements} differed"
            )

    def _needed(self) -> int:
        """Checks that would be enough if no other answer differed; at most those that are made."""
        low, high = self._bound.checked, _MAX_CHECKS
        while low < high:
            middle = (low + high) // 2
            bound = replace(self._bound, checked=middle)
            good = bound.excludes(self._tolerated) and not self._is_worse(bound)
            low, high = (low, middle) if good else (middle + 1, high)
        return high


_log = logging.getLogger(__name__)
_USELESS = (OSError, ValueError, KeyError, TypeError)  # what reading a file raises that is none of ours
_MOST = 2**40  # checks that can be
_FORMAT = 1  # raise it when a repair computes something else than before: what was shown is then of another repair


class TrustFile:
    """Keeps what checks have shown beside the disk tier, so that the next process goes on there.

    One small JSON file for each model, dtype, codec, chunking, tolerated share and list of repairs: with any of them
    changed, trust has to be earned again. A file is replaced as a whole; one that cannot be read, or is not what was
    written, counts as none. The counts are those of one process at a time: of several with one directory the last is
    kept, except that a repair which one of them has given up stays given up. All adapters of a model share a file, as
    they share a verdict.
    """

    def __init__(self, directory: Path, *, identity: Callable[[], str]) -> None:
        """``identity`` names everything the checks depend on, as it is now."""
        self._identity, self._made_for = identity, identity()
        self._path = directory / f"{hashlib.sha256(self._made_for.encode()).hexdigest()[:32]}.json"
        self._failed = False

    def load(self) -> TrustState | None:
        """What was kept last for this identity."""
        try:
            return self._read()
        except _USELESS as error:
            _log.warning("%s cannot be used, so trust is earned anew: %r", self._path, error)
            return None

    def save(self, state: TrustState, *, anew: bool = False) -> None:
        """Keep this for the next process. If that fails it is said once, and nothing else changes."""
        try:
            if self._identity() != self._made_for:
                return  # the model was changed in this process, and the next one loads the files as they were
            with suppress(*_USELESS):
                kept = self._read()
                if kept is not None and kept.rung > state.rung and not anew:
                    return  # another process has given this repair up
            self._write(state)
        except Exception as error:  # noqa: BLE001 - checks go on, whatever keeps them from being kept
            if not self._failed:
                _log.warning("%s cannot be written, so the next process earns trust anew: %r", self._path, error)
            self._failed = True

    def _read(self) -> TrustState | None:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        if (content["format"], content["identity"]) != (_FORMAT, self._made_for):
            raise ValueError("it was written by another version")
        return _checked(TrustState(**content["state"]))

    def _write(self, state: TrustState) -> None:
        content = json.dumps(
            {"format": _FORMAT, "identity": self._made_for, "state": dataclasses.asdict(state)}, indent=1
        )
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False, encoding="utf-8") as file:
            try:
                file.write(content + "\n")
                file.flush()
                os.replace(file.name, self._path)  # whole or not at all: other processes read it
            except OSError:
                os.unlink(file.name)
                raise


def _checked(state: TrustState) -> TrustState:
    counts = ((state.checked, state.differed), (state.recent_checked, state.recent_differed))
    whole = all(type(one) is int for one in (state.rung, *counts[0], *counts[1])) and type(state.earned) is bool
    if not whole or state.rung < 0 or any(not 0 <= differed <= checked < _MOST for checked, differed in counts):
        raise ValueError(f"no state of a trial: {state}")
    return state
