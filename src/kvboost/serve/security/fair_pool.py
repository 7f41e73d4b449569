"""Runs the work of several tenants on a few threads of its own, one of each tenant in turn.

Used for tokenising, which takes a second for a few megabytes: a tenant with a hundred such prompts makes another wait
for one of them, not for all. Invariants: what waits is bounded, and never more than an even share of it is one
tenant's once it is full; work that nobody waits for any more is dropped unless it was begun or ends an answer. A
tenant whose work takes long may have to rest before its next request (:mod:`kvboost.serve.security.pace`); what goes
on with a request comes before what begins one.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any, TypeVar

from kvboost.serve.errors import ApiError
from kvboost.serve.security.pace import Pace, Visit, visit_of

T = TypeVar("T")
_LOOK_S = 0.5  # who rests is looked at again so often: the others may have gone


@dataclass(eq=False)
class _Entry:
    future: Future[Any]
    work: Callable[[], Any]
    visit: Visit | None
    """The request that it is part of, where that is known."""

    @property
    def may_rest(self) -> bool:
        """Not the end of an answer, nor what goes on with a request."""
        return not (self.future.running() or (self.visit is not None and self.visit.begun))


class FairPool:
    """Thread-safe. Its threads begin with the first work and end with the process or with :meth:`close`."""

    def __init__(self, threads: int, *, max_waiting: int, name: str, pace: Pace | None = None) -> None:
        """``pace`` says how long a tenant rests after its work; if left out, not at all."""
        self.pace = pace or Pace(0.0)
        self._threads, self._max_waiting, self._name = threads, max_waiting, name
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[_Entry]] = OrderedDict()
        """By tenant, in the order of their turns."""
        self._started = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """Work that has not begun."""
        with self._changed:
            return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """What ``work`` returns or raises. Raises a 429 if too many wait, of which the tenant has its even share."""
        with self._changed:
            waiting = sum(map(len, self._waiting.values()))
            even_share = max(1, self._max_waiting // len({*self._waiting, tenant}))
            if waiting >= self._max_waiting and len(self._waiting.get(tenant, ())) >= even_share:
                raise ApiError(
                    429,
                    f"{self._max_waiting} requests wait to be read, this server's limit; try again in a moment",
                    code="too_many_requests",
                    headers={"Retry-After": "1"},
                )
        future: Future[T] = Future()
        entry = _Entry(future, partial(work, *arguments, **keywords), visit_of(tenant))
        self._add(tenant, entry)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._drop(tenant, entry)
            raise

    async def finish(self, tenant: str, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """The same for the end of an answer. It is never refused: answers are bounded in number themselves.

        It comes before the tenant's other work, without a rest, and is done also if nobody waits for it any more.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._add(tenant, _Entry(future, partial(work, *arguments, **keywords), None))
        return await asyncio.wrap_future(future)

    def _add(self, tenant: str, entry: _Entry) -> None:
        with self._changed:
            own = self._waiting.setdefault(tenant, deque())
            going_on = next((place for place, other in enumerate(own) if other.may_rest), len(own))
            own.insert(len(own) if entry.may_rest else going_on, entry)
            if self._started < self._threads:
                try:
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                    self._started += 1
                except RuntimeError as error:  # the machine has no thread left: the next request tries again
                    if not self._started:
                        self._take_out(tenant, entry)
                        raise ApiError(
                            503, "the server has no thread for this request; try again", headers={"Retry-After": "5"}
                        ) from error
            self._changed.notify()

    def _drop(self, tenant: str, entry: _Entry) -> None:
        """Take work out of the queue, so that it holds neither its prompt nor another's place."""
        with self._changed:
            self._take_out(tenant, entry)

    def _take_out(self, tenant: str, entry: _Entry) -> None:
        """The same, with the condition held."""
        own = self._waiting.get(tenant, deque())
        if entry in own:
            own.remove(entry)
            if not own:
                del self._waiting[tenant]

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next_tenant(self) -> str | None:
        """Whose turn it is, waiting until there is one; None if the pool was closed."""
        while not self._closed:
            waits = {}
            for tenant, own in self._waiting.items():
                waits[tenant] = self.pace.wait(tenant) if own[0].may_rest else 0.0
                if not waits[tenant]:
                    return tenant
            self._changed.wait(min(_LOOK_S, *waits.values()) if waits else None)
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                tenant = self._next_tenant()
                if tenant is None:
                    return
                own = self._waiting.pop(tenant)
                entry = own.popleft()
                if own:
                    self._waiting[tenant] = own  # behind the others
                if entry.visit is not None:
                    entry.visit.begun = True
            future, work = entry.future, entry.work
            began = thread_time()
            if future.running() or future.set_running_or_notify_cancel():  # otherwise whoever asked for it has gone
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
                    future.set_exception(error)
            self.pace.worked(tenant, thread_time() - began)
            del entry, future, work, own  # a prompt must not be held until the next one comes
