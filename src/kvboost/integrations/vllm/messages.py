"""What the two sides of the connector tell each other with every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvboost.types import Chunk


@dataclass
class Fetch:
    """Hold the KV of these chunks for a request, from whichever tier has them."""

    request: str
    chunks: list[Chunk]
    anywhere: bool = False
    """Also chunks that were computed behind other text."""


@dataclass
class Place:
    """Write held KV of positions ``[start, end)`` into a request's pages, then let go of it."""

    request: str
    start: int
    end: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)
    """The first ``end`` tokens, if some of it was computed behind other text."""


@dataclass
class Save:
    """Keep the KV of these chunks, which the step has computed."""

    request: str
    chunks: list[Chunk]
    contexts: list[bytes]
    pages: list[int]


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers, for one step."""

    fetches: list[Fetch] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    """Requests that want nothing any more of what is held for them."""


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From a worker to the scheduler, after one step."""

    held: dict[str, int] = field(default_factory=dict)
    """Leading chunks held for a request whose fetch has ended."""
    moved: dict[str, list[int]] = field(default_factory=dict)
    """Indices of further chunks held for it, which were computed behind other text."""
    stored: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Prefix and content keys of chunks that are stored now."""

    def aggregate(self, other: Any) -> Report:
        """What all workers have: each holds its own heads, and all of them are needed."""
        both = self.held.keys() | other.held.keys()
        held = {request: min(self.held.get(request, 2**31), other.held.get(request, 2**31)) for request in both}
        moved = {
            request: sorted(set(self.moved.get(request, ())) & set(other.moved.get(request, ())))
            for request in self.moved.keys() & other.moved.keys()
        }
        return Report(held, moved, self.stored + other.stored)
