"""Where a model's weights are: all in memory, or streamed layer by layer.

Used by the fingerprint, by memory estimates and by ``describe``. A weight streamer attaches itself with
:func:`attach_streamed_weights`, so that this package need not import it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvboost.capacity import WeightMemory

_ATTRIBUTE = "_kvboost_streamed_weights"


class StreamedWeights(Protocol):
    """What streams the weights of one model."""

    @property
    def memory(self) -> WeightMemory:
        """Bytes in memory, in buffers and on disk."""
        ...

    def holds(self, module: torch.nn.Module, key: str) -> bool:
        """Whether this parameter is streamed, so that its tensor does not identify its content."""
        ...

    def digest(self, module: torch.nn.Module, key: str, name: str) -> bytes:
        """The digest of a streamed parameter under the name it has now."""
        ...


def attach_streamed_weights(model: Any, weights: StreamedWeights) -> None:
    """Register ``weights`` as the streamer of ``model``."""
    setattr(model, _ATTRIBUTE, weights)


def streamed_weights_of(model: Any) -> StreamedWeights | None:
    """What streams this model's weights; None if they are all in memory."""
    return getattr(model, _ATTRIBUTE, None)


def weights_of(model: Any) -> WeightMemory:
    """Where a loaded model's weights are, in bytes."""
    streamed = streamed_weights_of(model)
    if streamed is not None:
        return streamed.memory
    unique = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    return WeightMemory(sum(tensor.numel() * tensor.element_size() for tensor in unique))


def describe_weights(model: Any) -> str:
    """Where a loaded model's weights are, in words."""
    if streamed_weights_of(model) is None:
        return "in memory"
    memory = weights_of(model)
    return (
        f"streamed: {memory.streamed / 1e6:.1f} MB are read in each step, {memory.resident / 1e6:.1f} MB stay, "
        f"buffers take {memory.buffers / 1e6:.1f} MB"
    )
