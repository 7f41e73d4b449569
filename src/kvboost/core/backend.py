"""What exact reuse needs from a model, as Protocols: a cache, a codec, a runner, and hooks into a prefill.

Implemented by :mod:`kvboost.hf` (cache, codec, runner), :mod:`kvboost.approx` (:class:`NonPrefixReuse`) and
:mod:`kvboost.offload.kv` (:class:`KVPaging`). Invariant: core imports none of them, and works without the last two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from kvboost.types import Chunk, KVBlock, LoadReport, NonPrefixReuseStats

if TYPE_CHECKING:
    import torch

    from kvboost.core.clock import StageClock
    from kvboost.core.guarded import GuardedStore
    from kvboost.core.prefill import PrefillState
    from kvboost.core.prefiller import Prefiller
    from kvboost.core.spans import ApproxSpans


class KVCache(Protocol):
    """The keys and values of one sequence, as a model writes and reads them."""

    @property
    def capacity(self) -> int:
        """Positions it can hold without growing."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        ...

    @property
    def is_poolable(self) -> bool:
        """Whether another request may use it after this one: its storage is still the one it was made with."""
        ...

    def get_seq_length(self) -> int:
        """Positions it holds."""
        ...

    def set_length(self, length: int) -> None:
        """Declare positions ``[0, length)`` to be the sequence so far."""
        ...

    def place(self, start: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a block's tensors to the positions from ``start`` on."""
        ...

    def span(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Positions ``[start, end)`` as :meth:`place` takes them: views where they can be."""
        ...

    def extract(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Copies of positions ``[start, end)``."""
        ...

    def wipe(self, start: int, end: int) -> None:
        """Set positions ``[start, end)`` to zero."""
        ...

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times, as beams need it."""
        ...


class Codec(Protocol):
    """Packs KV for a store and unpacks it into caches."""

    @property
    def name(self) -> str:
        """Part of the fingerprint: blocks of different codecs never mix."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether unpacking gives back the same bits."""
        ...

    def pack(self, tensors: Sequence[torch.Tensor], *, start: int) -> tuple[torch.Tensor, ...]:
        """The tensors to store, for a span that began at ``start``."""
        ...

    def place(self, cache: Any, start: int, packed: Sequence[torch.Tensor]) -> None:
        """Unpack into the positions of ``cache`` from ``start`` on."""
        ...

    def unpack(self, packed: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The block's tensors as the model had them."""
        ...


class Runner(Protocol):
    """Forward passes of one model."""

    def upload(self, tokens: Sequence[int]) -> torch.Tensor:
        """Token ids [n] where the model is."""
        ...

    def append(self, ids: torch.Tensor, cache: Any, *, logits: bool) -> torch.Tensor | None:
        """Compute uploaded ``ids`` behind what the cache holds. Returns the last one's logits [vocab] if ``logits``."""
        ...


class JointRunner(Protocol):
    """Forward passes of one model over several sequences at once."""

    def append(self, tokens: Sequence[Sequence[int]], caches: Sequence[Any]) -> torch.Tensor:
        """Compute ``tokens`` of each sequence behind what its cache holds. Returns their last logits, [n, vocab]."""
        ...


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


class KVPaging(Protocol):
    """Prefill of requests whose KV exceeds the memory limit."""

    @property
    def page_tokens(self) -> int:
        """Tokens in a page."""
        ...

    def open(
        self, prefiller: Prefiller, tokens: list[int], *, boundaries: Sequence[int], clock: StageClock
    ) -> AbstractContextManager[PrefillState]:
        """A prefill into pages, with the stored part of the prompt loaded. Leaving the block frees them."""
        ...
