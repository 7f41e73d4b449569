"""What is asked of non-prefix reuse, and the answers where there is none.

:mod:`kvboost.approx` has the reuse itself, as a subclass. Invariant: core does not import it, and works without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvboost.core.guarded import GuardedStore
from kvboost.core.spans import ApproxSpans
from kvboost.core.state import PrefillState
from kvboost.types import Chunk, KVBlock, LoadReport, NonPrefixReuseStats


class NonPrefixReuse:
    """Reuse of chunks from other positions: none here, but in subclasses.

    KV is approximate from the first such chunk on.
    """

    is_on = False
    """Whether it may ever find something."""
    repositioned_chunks = 0

    def __init__(self, reason: str | None = None) -> None:
        """``reason`` says why there is none, if the settings would allow it."""
        self.reason = reason

    def for_tenant(self, store: GuardedStore) -> NonPrefixReuse:
        """The same for another tenant's store."""
        return self

    def boundaries(self, tokens: Sequence[int]) -> Sequence[int]:
        """Where documents that it knows are cut in a prompt."""
        return ()

    def first_wanted(self, chunks: Sequence[Chunk], *, available: int) -> int | None:
        """The first chunk that :meth:`find` would look for; None if it would not look. Changes nothing."""
        return None

    def find(
        self, chunks: Sequence[Chunk], *, available: int, prompt_tokens: int, fetched: LoadReport | None = None
    ) -> tuple[ApproxSpans | None, str | None]:
        """The chunks after the first ``available`` that are worth repositioning, or None and the reason.

        With ``fetched`` only those in memory: the others were loaded before, as it reports.
        """
        return None, self.reason

    def replay(self, blocks: Mapping[int, KVBlock]) -> ApproxSpans:
        """The spans of a prompt that was prefilled with these blocks before."""
        raise AssertionError("a prompt without repositioned chunks has none to replay")

    def repair(self, state: PrefillState) -> str | None:
        """Copy the chunks found for ``state`` into its cache, and fill it up to the last step.

        Calls :meth:`PrefillState.repaired`. Returns why it failed, None if it did not; raises nothing.
        """
        raise AssertionError("nothing was repositioned")

    def keep(self, state: PrefillState) -> int:
        """Store what was computed behind approximate KV, marked as such. Returns how many blocks were new."""
        return 0

    def observe(self, stages: Mapping[str, float], *, moved_tokens: int, expected: float) -> None:
        """Update cost estimates from a prefill's stages; its repair was ``expected`` to take so long (0: unknown)."""

    def forget(self) -> None:
        """Drop what is known of prompts: the store is being cleared."""

    def trust_again(self) -> None:
        """Reset what checks have shown."""

    def close(self) -> None:
        """Remove its hooks from the model."""

    def stats(self) -> NonPrefixReuseStats:
        """Counts and bounds of the shadow checks."""
        return NonPrefixReuseStats(allowed=False, reason=self.reason, checked=0, differing=0, differing_at_most=1.0)

    def describe(self) -> str:
        """One line: on or off, with the settings or the reason."""
        return f"off: {self.reason or 'by the settings'}"
