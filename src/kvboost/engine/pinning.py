"""Holds the chunks of chosen prompts against eviction, until they are released or their time is over.

Used by ``save_context`` and by the server. Invariants: pinned chunks take half of the memory store at most, so that
others always fit; a pin holds leases like any request, and nothing else.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvboost.core.session import Session
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
    name: str | None = None
    """A tenant has one pin of a name: the newest."""
    seconds: float | None = None
    """How long it is held; None until it is removed."""


class Pins:
    """The pins of one engine. Thread-safe. One whose time is over goes with the next call."""

    def __init__(self, *, shared_store: bool = False, max_share: float = 0.5) -> None:
        """``shared_store``: the engine was given a store, whose capacity is that of all tenants."""
        self._shared_store, self._max_share = shared_store, max_share
        self._lock = threading.Lock()
        self._pins: dict[str, tuple[Pin, Lease, float]] = {}

    def add(
        self,
        session: Session | None,
        tokens: Sequence[int],
        *,
        boundaries: Sequence[int] = (),
        name: str | None = None,
        seconds: float | None = None,
    ) -> Pin:
        """Hold what is stored of this prompt's beginning.

        Raises ConfigError if nothing is, and CapacityError if all pins together would take too much.
        """
        if session is None:
            raise ConfigError("this engine keeps nothing, so nothing can be pinned")
        prefiller = session.prefiller
        lease = prefiller.store.lease(prefiller.leading(prefiller.chunk(list(tokens), boundaries)))
        blocks = lease.blocks
        if not blocks:
            lease.release()
            raise ConfigError("nothing of this prompt is stored, so nothing can be pinned; make it longer")
        pin = Pin(
            secrets.token_hex(8),
            session.tenant,
            len(blocks),
            blocks[-1].start + len(blocks[-1].tokens) // TOKEN_BYTES,  # a state has none, and stands at the end
            sum(block.nbytes for block in blocks),
            name,
            seconds,
        )
        share = None if self._shared_store else session.tenant
        limit = int(self._max_share * store_stats(session.store, share).capacity_bytes)
        self._remove_ended()
        with self._lock:
            old = [other for other, _, _ in self._pins.values() if name is not None and _same_name(other, pin)]
            held = sum(other.nbytes for other, _, _ in self._pins.values()) - sum(other.nbytes for other in old)
            if fits := held + pin.nbytes <= limit:
                ends = time.monotonic() + seconds if seconds is not None else float("inf")
                self._pins[pin.id] = (pin, lease, ends)
        if fits:
            for other in old:
                self.remove(other.id)
            return pin
        lease.release()
        raise CapacityError(
            f"contexts and pins may hold {limit:,} bytes, half of the memory store; {held:,} are held, this one needs "
            f"{pin.nbytes:,} or more; drop a context, unpin something, or raise cache_bytes"
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
        self._remove_ended()
        with self._lock:
            return [pin for pin, _, _ in self._pins.values()]

    def _remove_ended(self) -> None:
        with self._lock:
            ended = [id for id, (_, _, ends) in self._pins.items() if ends <= time.monotonic()]
        for id in ended:
            self.remove(id)


def _same_name(one: Pin, other: Pin) -> bool:
    return (one.tenant, one.name) == (other.tenant, other.name)
