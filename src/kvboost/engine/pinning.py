"""Holds the chunks of chosen prompts against eviction, until they are released or their time is over.

Used by ``save_context`` and by the server. Invariants: pinned chunks take half of the memory store at most, so that
others always fit, and those that clients asked for a quarter, so that the operator's fit; the same holds of a tenant
and its quota; a pin holds leases like any request, and nothing else.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
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
    client: bool = False
    """Whether a client's request asked for it. Then it goes where the room is needed for other pins."""


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
        client: bool = False,
    ) -> Pin:
        """Hold what is stored of this prompt's beginning; ``client`` if a request asked for it, not the operator.

        Pins of clients go where they leave too little room for this one. Raises ConfigError if nothing is stored, and
        CapacityError if the pins that stay would take too much.
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
            client,
        )
        whole = store_stats(session.store, None, ask_tiers=False).capacity_bytes
        share = None if self._shared_store else session.tenant
        quota = store_stats(session.store, share, ask_tiers=False).capacity_bytes
        self._remove_ended()
        with self._lock:
            kept = [other for other, _, _ in self._pins.values() if name is None or not _same_name(other, pin)]
            while (excess := self._excess(kept, pin, whole=whole, quota=quota)) and (goes := _next_to_go(kept, pin)):
                kept.remove(goes)
            if excess is None:
                gone = self._pins.keys() - {other.id for other in kept}
                ends = time.monotonic() + seconds if seconds is not None else float("inf")
                self._pins[pin.id] = (pin, lease, ends)
        if excess is None:
            for id in gone:
                self.remove(id)
            return pin
        lease.release()
        limit, held = excess
        raise CapacityError(
            f"contexts and pins may hold {limit:,} bytes, half of the memory store (those of clients a quarter); "
            f"{held:,} are held, this one needs {pin.nbytes:,} or more; drop a context, unpin something, or raise "
            "cache_bytes"
        )

    def _excess(self, kept: Sequence[Pin], pin: Pin, *, whole: int, quota: int) -> tuple[int, int] | None:
        """The limit that this pin would exceed beside those ``kept``, and what they hold of it; None if it fits.

        Limits are of the ``whole`` memory and of the tenant's ``quota``, for all pins and for those of clients.
        """
        for capacity, pins in ((quota, [other for other in kept if other.tenant == pin.tenant]), (whole, kept)):
            limits = [(self._max_share, pins)]
            if pin.client:
                limits.append((self._max_share / 2, [other for other in pins if other.client]))
            for share, counted in limits:
                limit, held = int(share * capacity), sum(other.nbytes for other in counted)
                if held + pin.nbytes > limit:
                    return limit, held
        return None

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
    """A client's pin never replaces one of the operator's."""
    return (one.tenant, one.name, one.client) == (other.tenant, other.name, other.client)


def _next_to_go(kept: Sequence[Pin], pin: Pin) -> Pin | None:
    """The oldest pin of a client: of whoever holds most with ``pin``, if that is a client's; None if nobody has one."""
    clients = [other for other in kept if other.client]
    if pin.client:
        held = Counter({pin.tenant: pin.nbytes})
        for other in clients:
            held[other.tenant] += other.nbytes
        clients = [other for other in clients if other.tenant == max(held, key=held.__getitem__)]
    return next(iter(clients), None)
