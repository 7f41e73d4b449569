"""Holds the chunks of chosen prompts against eviction, until they are released or their time is over.

Used by ``save_context`` and by the server. Invariants: pinned chunks take half of the memory store at most, so that
others always fit, and clients' a quarter; the same holds of a tenant and its quota; a pin of a client goes before one
of the operator is refused; a pin holds leases like any request, and nothing else.
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
        quota = None if self._shared_store else session.tenant
        capacities = [store_stats(session.store, of, ask_tiers=False).capacity_bytes for of in (quota, None)]
        self._remove_ended()
        gone: list[Pin] = []
        try:
            with self._lock:
                pins = [one for one, _, _ in self._pins.values()]
                named = (session.tenant, name, client)  # so a client's pin never replaces one of the operator's
                replaced = [one for one in pins if name is not None and (one.tenant, one.name, one.client) == named]
                for tenant, capacity in zip((pin.tenant, None), capacities, strict=True):
                    stay = [one for one in pins if one not in replaced + gone and tenant in (None, one.tenant)]
                    gone += self._gone_for(pin, stay, capacity)
                ends = time.monotonic() + seconds if seconds is not None else float("inf")
                self._pins[pin.id] = (pin, lease, ends)
        except CapacityError:
            lease.release()
            raise
        for one in replaced + gone:
            self.remove(one.id)
        return pin

    def _gone_for(self, pin: Pin, others: Sequence[Pin], capacity: int) -> list[Pin]:
        """The clients' pins that go for this one, the oldest first. Raises CapacityError if it does not fit even so."""
        limit, pins = int(self._max_share * capacity), (*others, pin)
        held = sum(one.nbytes for one in pins if not one.client)
        clients = [one for one in pins if one.client]
        room = min(limit // 2, limit - held)
        if room < (pin.nbytes if pin.client else 0):
            what, most = ("clients' pins", limit // 2) if pin.client else ("contexts and pins", limit)
            raise CapacityError(
                f"{what} may hold {most:,} bytes of memory; all hold {sum(one.nbytes for one in others):,} now, "
                f"this one needs {pin.nbytes:,} or more; drop a context, unpin something, or raise cache_bytes"
            )
        gone: list[Pin] = []
        while sum(one.nbytes for one in clients) > room:
            gone.append(clients.pop(0))
        return gone

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
