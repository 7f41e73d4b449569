"""What the two sides of the connector say to each other with every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvboost.integrations.vllm.page_events import Change
from kvboost.types import Chunk

IDLE_S = 0.01  # that a step without work waits for what is looked for or fetched: new requests wait as long


@dataclass
class Fetch:
    """Hold the KV of these chunks, from whichever tier has them, until it is loaded or released."""

    number: int
    """Names what is held. A request that is looked for again has another."""
    chunks: list[Chunk]
    anywhere: bool = False
    """Also chunks that were computed behind other text."""


@dataclass
class Load:
    """Write held KV of positions ``[start, end)`` into a request's pages, then let go of it."""

    fetch: int
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
    """From the scheduler to the worker, for one step."""

    fetches: list[Fetch] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    """Fetches of which nothing is wanted any more."""
    failures: int = 0
    """Loads that the scheduler knows to have failed."""
    idle: bool = False
    """Nothing is computed in this step, and it may wait for a fetch."""


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the worker to the scheduler, after one step."""

    held: dict[int, int] = field(default_factory=dict)
    """Leading chunks held, by fetch."""
    moved: dict[int, list[int]] = field(default_factory=dict)
    """Indices of further chunks held, which were computed behind other text."""
    stored: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Prefix and content keys of chunks that are stored now."""
    refused: set[str] = field(default_factory=set)
    """Requests of which the store did not take everything, as when it has evicted what comes before."""
    failures: int = 0
    """Loads that failed: what was computed in these steps is of no use."""
    changes: list[Change] = field(default_factory=list)
    """What the worker's tiers have gained and lost, if vLLM publishes KV events."""

    def aggregate(self, other: Any) -> Report:
        """There is one worker: see :func:`kvboost.integrations.vllm.setup.make_setup`."""
        raise NotImplementedError("KVBoostConnector runs with one worker")
