"""What a router knows from events alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost.fleet.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class Picture:
    """The blocks that are announced, by tier."""

    def __init__(self) -> None:
        self.held: dict[str | None, dict[Any, BlockStored]] = {}
        self.batches = 0

    def apply(self, events: Sequence[KVEvent]) -> None:
        self.batches += 1
        for event in events:
            match event:
                case BlockStored():
                    for key in event.block_hashes:
                        self.held.setdefault(event.ownership, {})[key] = event
                case BlockRemoved():
                    for key in event.block_hashes:
                        self.held.get(event.ownership, {}).pop(key, None)
                case AllBlocksCleared():
                    self.held.clear()

    def keys(self, tier: str | None) -> set[Any]:
        return set(self.held.get(tier, ()))
