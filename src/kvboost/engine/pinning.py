"""Holds the chunks of chosen prompts against eviction, until they are released.

Used by the server for its admin. Invariants: pinned chunks take half of the memory store at most, so that others
always fit; a pin holds leases like any request, and nothing else.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvboost.engine.engine import KVBoost
from kvboost.engine.stats import store_stats
from kvboost.errors import CapacityError, ConfigError
from kvboost.extend import Lease
from kvboost.types import TOKEN_BYTES


@dataclass(frozen=True)
class Pin:
    """What one pin holds."""

    id: str
    tenant: str
    chunks: int
    tokens: int
    nbytes: int


class Pins:
    """The pins of one engine. Thread-safe."""

    def __init__(self, engine: KVBoost, *, max_share: float = 0.5) -> None:
        self._engine = engine
        self._max_share = max_share
        self._lock = threading.Lock()
        self._pins: dict[str, tuple[Pin, Lease]] = {}

    def add(self, tokens: Sequence[int], *, boundaries: Sequence[int] = (), tenant: str = "") -> Pin:
        """Hold what is stored of this prompt's beginning.

        Raises ConfigError if nothing is, and CapacityError if all pins together would take too much.
        """
        session = (self._engine.for_tenant(tenant) if tenant else self._engine).session
        if session is None:
            raise ConfigError("this engine keeps nothing, so nothing can be pinned")
        prefiller = session.prefiller
        lease = prefiller.store.lease(prefiller.chunk(list(tokens), boundaries).chunks)
        blocks = lease.blocks
        if not blocks:
            lease.release()
            raise ConfigError("nothing of this prompt is stored, so nothing can be pinned; make it one chunk or longer")
        pin = Pin(
            secrets.token_hex(8),
            tenant,
            len(blocks),
            blocks[-1].start + len(blocks[-1].tokens) // TOKEN_BYTES,
            sum(block.nbytes for block in blocks),
        )
        share = session.tenant if self._engine.parts.owns_store else None
        limit = int(self._max_share * store_stats(session.store, share).capacity_bytes)
        with self._lock:
            held = sum(other.nbytes for other, _ in self._pins.values())
            if held + pin.nbytes <= limit:
                self._pins[pin.id] = (pin, lease)
                return pin
        lease.release()
        raise CapacityError(
            f"pins may hold {limit:,} bytes, {held:,} are held and this one needs {pin.nbytes:,}; unpin something"
        )

    def remove(self, id: str) -> bool:
        """Let one go. False if there is no such pin."""
        with self._lock:
            found = self._pins.pop(id, None)
        if found is None:
            return False
        found[1].release()
        return True

    def clear(self, *, tenant: str | None = None) -> None:
        """Let all go, or all of one tenant."""
        for pin in self.listed():
            if tenant in (None, pin.tenant):
                self.remove(pin.id)

    def listed(self) -> list[Pin]:
        """All pins, oldest first."""
        with self._lock:
            return [pin for pin, _ in self._pins.values()]
