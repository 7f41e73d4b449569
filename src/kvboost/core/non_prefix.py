"""What a prefill asks of non-prefix reuse, as a Protocol, and the answers where there is none.

Implemented by :mod:`kvboost.approx`; the engine asks that for everything else (:mod:`kvboost.engine.optional`).
Invariant: core does not import it, and works without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvboost.core.spans import ApproxSpans
from kvboost.core.state import PrefillState
from kvboost.types import Chunk, KVBlock, LoadReport, NonPrefixReuseStats


class NonPrefixReuse(Protocol):
    """Reuse of chunks from other positions. KV is approximate from the first such chunk on."""

    def boundaries(self, tokens: Sequence[int]) -> Sequence[int]:
        """Where documents that it knows are cut in a prompt."""
        ...

    def first_wanted(self, chunks: Sequence[Chunk], *, available: int) -> int | None:
        """The first chunk that :meth:`find` would look for; None if it would not look. Changes nothing."""
        ...

    def find(
        self, chunks: Sequence[Chunk], *, available: int, prompt_tokens: int, fetched: LoadReport | None = None
    ) -> tuple[ApproxSpans | None, str | None]:
        """The chunks after the first ``available`` that are worth repositioning, or None and the reason.

        With ``fetched`` only those in memory: the others were loaded before, as it reports.
        """
        ...

    def replay(self, blocks: Mapping[int, KVBlock]) -> ApproxSpans:
        """The spans of a prompt that was prefilled with these blocks before."""
        ...

    def repair(self, state: PrefillState) -> str | None:
        """Copy the chunks found for ``state`` into its cache, and fill it up to the last step.

        Calls :meth:`PrefillState.repaired`. Returns why it failed, None if it did not; raises nothing.
        """
        ...

    def keep(self, state: PrefillState) -> int:
        """Store what was computed behind approximate KV, marked as such. Returns how many blocks were new."""
        ...

    def observe(self, state: PrefillState) -> None:
        """Update cost estimates from a prefill whose first token exists."""
        ...


@dataclass(frozen=True)
class NoApprox:
    """Exact reuse only. Nothing is found, so there is nothing to replay, repair, keep or observe."""

    reason: str | None = None
    """Why, if the settings would allow non-prefix reuse."""
    repositioned_chunks = 0

    def boundaries(self, tokens: Sequence[int]) -> Sequence[int]:
        """None."""
        return ()

    def first_wanted(self, chunks: Sequence[Chunk], *, available: int) -> int | None:
        """None."""
        return None

    def find(
        self, chunks: Sequence[Chunk], *, available: int, prompt_tokens: int, fetched: LoadReport | None = None
    ) -> tuple[ApproxSpans | None, str | None]:
        """Nothing."""
        return None, self.reason

    def replay(self, blocks: Mapping[int, KVBlock]) -> ApproxSpans:
        """Never called."""
        raise AssertionError("a prompt without repositioned chunks has none to replay")

    def repair(self, state: PrefillState) -> str | None:
        """Never called."""
        raise AssertionError("nothing was repositioned")

    def keep(self, state: PrefillState) -> int:
        """Nothing."""
        return 0

    def observe(self, state: PrefillState) -> None:
        """Nothing."""

    def stats(self) -> NonPrefixReuseStats:
        """Off."""
        return NonPrefixReuseStats(allowed=False, reason=self.reason, checked=0, differing=0, differing_at_most=1.0)

    def describe(self) -> str:
        """Off, and why."""
        return f"off: {self.reason or 'by the settings'}"
