"""What a prefill needs from a model, as Protocols: a cache, a codec and a runner.

Implemented by :mod:`kvboost.hf`. Invariant: core imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


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

    def states(self) -> tuple[torch.Tensor, ...]:
        """The states of recurrent layers: views, which the next token overwrites. Nothing for most models."""
        ...

    def place_states(self, tensors: Sequence[torch.Tensor]) -> None:
        """Go on after copies of these states, which belong to the sequence so far."""
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

    def pack_each(self, cache: Any, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, ...]]:
        """The tensors to store of each of these spans, which follow one another, copied when asked for."""
        ...

    def place(self, cache: Any, start: int, packed: Sequence[torch.Tensor]) -> None:
        """Unpack into the positions of ``cache`` from ``start`` on."""
        ...

    def place_each(self, cache: Any, blocks: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        """Unpack each of these, from its own position on."""
        ...

    def unpack(self, packed: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The block's tensors as the model had them."""
        ...


class Runner(Protocol):
    """Forward passes of one model."""

    def upload(self, tokens: Sequence[int]) -> torch.Tensor:
        """Token ids [n] where the model is."""
        ...

    def mark(self) -> torch.Event | None:
        """An event behind all that the calling thread has asked the device for; None where that is done already."""
        ...

    def append(self, ids: torch.Tensor, cache: Any, *, logits: bool) -> torch.Tensor | None:
        """Compute uploaded ``ids`` behind what the cache holds. Returns the last one's logits [vocab] if ``logits``."""
        ...
