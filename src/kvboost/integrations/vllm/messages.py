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
    first_page: int
    pages: list[int]
    """Those of the chunks, from the request's page number ``first_page`` on."""


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers, for one step."""

    fetches: list[Fetch] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    """Requests that want nothing any more of what is held for them."""
    epoch: int = 0
    """How many failures the scheduler knew of."""


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From a worker to the scheduler, after one step."""

    held: dict[str, int] = field(default_factory=dict)
    """Leading chunks held for a request whose fetch has ended."""
    moved: dict[str, list[int]] = field(default_factory=dict)
    """Indices of further chunks held for it, which were computed behind other text."""
    stored: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Prefix and content keys of chunks that are stored now."""
    failures: int = 0
    """Loads that failed: what was computed in these steps is of no use."""

    def aggregate(self, other: Any) -> Report:
        """There is one worker: see :func:`kvboost.integrations.vllm.place.make_place`."""
        raise NotImplementedError("KVBoostConnector runs with one worker")
