"""What a prefill asks of non-prefix reuse, as a Protocol, and the answers where there is none.

Implemented by :mod:`kvboost.approx`. Invariant: core does not import it, and works without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvboost.core.guarded import GuardedStore
from kvboost.core.prefill import PrefillState
from kvboost.core.spans import ApproxSpans
from kvboost.types import Chunk, KVBlock, LoadReport, NonPrefixReuseStats


class NonPrefixReuse(Protocol):
    """Reuse of chunks from other positions. KV is approximate from the first such chunk on."""

    @property
    def reason(self) -> str | None:
        """Why there is no non-prefix reuse; None if there is."""
        ...

    def boundaries(self, tokens: Sequence[int]) -> Sequence[int]:
        """Where documents that it was told of are cut in a prompt."""
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

    def place(self, state: PrefillState) -> None:
        """Copy the repositioned chunks of ``state`` into its cache."""
        ...

    def repair(self, state: PrefillState) -> None:
        """Fill the cache up to the last step, and call :meth:`PrefillState.repaired`."""
        ...

    def keep(self, state: PrefillState) -> int:
        """Store what was computed behind approximate KV, marked as such. Returns how many blocks were new."""
        ...

    def observe(self, state: PrefillState) -> None:
        """Update cost estimates from a prefill whose first token exists."""
        ...

    def failed(self, error: Exception) -> str:
        """Count an error of placing or repairing, and return the reason for the report."""
        ...

    def forget(self) -> None:
        """The store was cleared."""
        ...

    def for_tenant(self, store: GuardedStore) -> NonPrefixReuse:
        """The same over another tenant's store."""
        ...

    def stats(self) -> NonPrefixReuseStats:
        """Counts and bounds of its shadow checks."""
        ...

    @property
    def repositioned_chunks(self) -> int:
        """Chunks repositioned so far."""
        ...

    def describe(self) -> str:
        """One line: on or off, with the settings or the reason."""
        ...

    def allow(self) -> None:
        """Allow it again after checks have stopped it."""
        ...

    def close(self) -> None:
        """Remove its hooks from the model."""
        ...


class NoApprox:
    """Exact reuse only."""

    repositioned_chunks = 0

    def __init__(self, reason: str | None = None) -> None:
        """``reason`` is why, if the settings would allow non-prefix reuse."""
        self.reason = reason

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

    def place(self, state: PrefillState) -> None:
        """Nothing to place."""

    def repair(self, state: PrefillState) -> None:
        """Nothing to repair."""

    def keep(self, state: PrefillState) -> int:
        """Nothing to keep."""
        return 0

    def observe(self, state: PrefillState) -> None:
        """Nothing to observe."""

    def failed(self, error: Exception) -> str:
        """Cannot fail."""
        raise AssertionError("nothing was repositioned") from error

    def forget(self) -> None:
        """Nothing to forget."""

    def for_tenant(self, store: GuardedStore) -> NonPrefixReuse:
        """Shared by all tenants."""
        return self

    def stats(self) -> NonPrefixReuseStats:
        """Off."""
        return NonPrefixReuseStats(allowed=False, reason=self.reason, checked=0, differing=0, differing_at_most=1.0)

    def describe(self) -> str:
        """Off, and why."""
        return f"off: {self.reason or 'by the settings'}"

    def allow(self) -> None:
        """Nothing to allow."""

    def close(self) -> None:
        """Nothing to close."""
