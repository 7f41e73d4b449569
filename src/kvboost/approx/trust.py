"""What the checks of non-prefix reuse have shown so far, and a file that keeps it for the next process.

Used by :class:`kvboost.approx.guard.ReuseGuard` with ``quality="auto"``. Invariant: a file is replaced as a whole, and
one that cannot be read, or is not what was written, counts as none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrustState:
    """How far the trial is."""

    rung: int = 0
    allowed: bool = False
    checked: int = 0
    differed: int = 0
    recent_checked: int = 0
    """Of the latest checks of a repair in use, which are also judged by themselves."""
    recent_differed: int = 0


_log = logging.getLogger(__name__)
_USELESS = (OSError, ValueError, KeyError, TypeError)  # what reading a file raises that is none of ours
_MOST = 2**40  # checks that can be
_FORMAT = 2  # raise it when a repair computes something else than before: what was shown is then of another repair


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
    whole = all(type(one) is int for one in (state.rung, *counts[0], *counts[1])) and type(state.allowed) is bool
    if not whole or state.rung < 0 or any(not 0 <= differed <= checked < _MOST for checked, differed in counts):
        raise ValueError(f"no state of a trial: {state}")
    return state
