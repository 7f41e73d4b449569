"""The repositioned chunks of one prompt: what is planned for them, how far their repair reaches, and what came of it.

Found by :mod:`kvboost.approx`, held by :class:`kvboost.core.state.PrefillState`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvboost.core.guarded import EmptyLease
from kvboost.extend import ContentLease
from kvboost.types import KVBlock

_MAX_TAIL = 512  # tokens: a question runs in one forward with the last token, more belongs to the repair


def repair_end(tokens: int, *, moved_end: int, cut_end: int) -> int:
    """Where the repair of a prompt with so many tokens ends; ``cut_end`` is the end of its last chunk."""
    return moved_end if tokens - moved_end <= _MAX_TAIL else cut_end


class CheckSlot(Protocol):
    """One of the few slots for requests that are checked."""

    def release(self) -> None:
        """Leave it to another request. Harmless the second time."""
        ...


@dataclass(frozen=True)
class ApproxSpans:
    """The chunks of one prompt whose KV was computed at other positions."""

    strategy: str
    """Name of the repair strategy, for the report."""
    blocks: Mapping[int, KVBlock]
    """By chunk index in the prompt."""
    lease: ContentLease = field(default_factory=EmptyLease)
    expected_seconds: float = 0.0
    """Expected time of selecting and recomputing, as plain steps."""
    compute_seconds: float = 0.0
    """Expected time of computing all of it instead; 0 if unknown. A repair that will not be faster stops early."""
    rung: int = 0
    """Which of the repairs is used."""
    ratio: float = 0.0
    """The share of their tokens that it recomputes."""
    on_trial: bool = False
    """To be checked once the prompt was answered without them."""
    slot: CheckSlot | None = None
    """Held until the request was checked, or will not be."""
    replayed: bool = False
    """Of a check: no request uses them."""

    @property
    def depth(self) -> int:
        """``approx_depth`` of what is computed behind them."""
        return 1 + max(block.approx_depth for block in self.blocks.values())

    def release(self) -> None:
        """They are not used, or no more."""
        self.lease.release()
        if self.slot is not None:
            self.slot.release()


@dataclass(frozen=True)
class RepairOutcome:
    """The result of a repair."""

    recomputed_tokens: int
    """As a mean over the layers."""
    error_estimate: float | None
    positions: Sequence[int] = ()
    """Those that were recomputed in all layers."""
