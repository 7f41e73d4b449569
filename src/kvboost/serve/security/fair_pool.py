"""Runs the work of several tenants in a thread of its own, one piece of each tenant in turn.

The interpreter runs one thread at a time, so the model as well waits for whoever parses a large body, tokenises a few
megabytes or compiles a schema. The server has a :class:`FairPool` for each of these and one :class:`Pace` for all.
Invariants: what waits is bounded, and once that is full, no tenant has more of it than an even share; work that nobody
waits for any more is dropped, unless it was begun or ends an answer; while other tenants are here, the next request of
one rests ``rest`` seconds, up to a bound, for each second of a processor that its work took; a request that was begun
does not rest again, and a tenant that is alone never does.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from time import monotonic, thread_time
from typing import Any, TypeVar

from kvboost.serve.errors import ApiError, too_many

T = TypeVar("T")
_LOOK_S = 0.5  # who rests is looked at again so often: the others may have gone
_HERE_S = 2.0  # after its last request a tenant counts as here
_MAX_REST_S = 5.0  # however much was worked


@dataclass(eq=False)
class _Visit:
    """A request that is under way."""

    tenant: str
    begun: bool = False
    """Whether any of its work was."""


_visit: ContextVar[_Visit | None] = ContextVar("the request that is answered", default=None)


def _visit_of(tenant: str) -> _Visit | None:
    """The request that is being answered, if it is this tenant's: an admin's may be for another."""
    visit = _visit.get()
    return visit if visit is not None and visit.tenant == tenant else None


class Pace:
    """Who is here, and who rests. Thread-safe."""

    def __init__(self, rest: float) -> None:
        """For each second of work, ``rest`` seconds of rest."""
        self._rest = rest
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        """When a tenant's last request ended, where it was a moment ago."""
        self._begins: dict[str, float] = {}
        """When a tenant's next request may begin."""

    @contextmanager
    def here(self, tenant: str) -> Iterator[None]:
        """A request of this tenant is under way."""
        with self._lock:
            self._under_way[tenant] += 1
        token = _visit.set(_Visit(tenant))
        try:
            yield
        finally:
            _visit.reset(token)
            now = monotonic()
            with self._lock:
                self._under_way[tenant] -= 1
                self._under_way += Counter()  # keeps those that have any
                self._last[tenant] = now
                self._last = {name: ended for name, ended in self._last.items() if now - ended < _HERE_S}
                self._begins = {name: begins for name, begins in self._begins.items() if begins > now}

    def is_under_way(self, tenant: str) -> bool:
        """Whether a request of this tenant is."""
        with self._lock:
            return tenant in self._under_way

    def worked(self, tenant: str, seconds: float) -> None:
        """Work of this tenant has just ended, and took so much of a processor."""
        if self._rest:
            now = monotonic()
            with self._lock:
                begins = max(self._begins.get(tenant, now), now) + self._rest * seconds
                self._begins[tenant] = min(begins, now + _MAX_REST_S)

    def wait(self, tenant: str) -> float:
        """Seconds until this tenant's next request may begin."""
        now = monotonic()
        with self._lock:
            others = self._under_way.keys() | {name for name, ended in self._last.items() if now - ended < _HERE_S}
            if not others - {tenant}:
                return 0.0
            return max(0.0, self._begins.get(tenant, now) - now)


@dataclass(eq=False)
class _Entry:
    future: Future[Any]
    work: Callable[[], Any]
    visit: _Visit | None
    """The request that it is part of, where that is known."""

    @property
    def may_rest(self) -> bool:
        """Whether this begins a request: the rest of a request and the end of its answer never wait."""
        return not (self.future.running() or (self.visit is not None and self.visit.begun))


class FairPool:
    """Thread-safe. Its thread begins with the first work and ends with the process or with :meth:`close`."""

    def __init__(self, *, max_waiting: int, name: str, pace: Pace | None = None) -> None:
        """``pace`` says how long a tenant rests after its work; if left out, not at all."""
        self.pace = pace or Pace(0.0)
        self._max_waiting, self._name = max_waiting, name
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[_Entry]] = {}
        """By tenant, in the order of their turns."""
        self._started = False
        self._closed = False

    @property
    def waiting(self) -> int:
        """Work that has not begun."""
        with self._changed:
            return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """What ``work`` returns or raises. Raises a 429 if too many wait, of which the tenant has its even share."""
        with self._changed:
            even_share = max(1, self._max_waiting // len({*self._waiting, tenant}))
            if self.waiting >= self._max_waiting and len(self._waiting.get(tenant, ())) >= even_share:
                raise too_many(f"{self._max_waiting} requests wait to be read")
        future: Future[T] = Future()
        entry = _Entry(future, partial(work, *arguments, **keywords), _visit_of(tenant))
        self._add(tenant, entry)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._changed:
                self._drop(tenant, entry)
            raise

    async def finish(self, tenant: str, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """The same for the end of an answer. It is never refused: answers are bounded in number themselves.

        It comes before the tenant's other work, without a rest, and is done also if nobody waits for it any more.
        """
        return await asyncio.wrap_future(self.start(tenant, work, *arguments, **keywords))

    def start(self, tenant: str, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> Future[T]:
        """The same for work that nobody has to wait for."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._add(tenant, _Entry(future, partial(work, *arguments, **keywords), None))
        return future

    def _add(self, tenant: str, entry: _Entry) -> None:
        with self._changed:
            own = self._waiting.setdefault(tenant, deque())
            first_resting = next((index for index, other in enumerate(own) if other.may_rest), len(own))
            own.insert(len(own) if entry.may_rest else first_resting, entry)
            if not self._started:
                try:
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                except RuntimeError as error:  # the machine has no thread left: the next request tries again
                    self._drop(tenant, entry)
                    raise ApiError(
                        503, "the server has no thread for this request; try again", headers={"Retry-After": "5"}
                    ) from error
                self._started = True
            self._changed.notify()

    def _drop(self, tenant: str, entry: _Entry) -> None:
        """Remove work from the queue: it holds a prompt and counts against others. Needs the condition."""
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
                    self._waiting[tenant] = own  # after the others
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
