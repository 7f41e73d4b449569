"""Runs the work of several tenants in a thread of its own, one piece of each tenant in turn.

The interpreter runs one thread at a time, so the model as well waits for whoever parses a large body, tokenises a few
megabytes or compiles a schema. The server has a :class:`FairPool` for each of these. Invariants: what waits is bounded,
and once that is full, no tenant has more of it than an even share; work that nobody waits for any more is dropped,
unless it was begun or ends an answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvboost.serve.errors import ApiError, too_many

T = TypeVar("T")


@dataclass(eq=False)
class _Entry:
    future: Future[Any]
    work: Callable[[], Any]


class FairPool:
    """Thread-safe. Its thread begins with the first work and ends with the process or with :meth:`close`."""

    def __init__(self, *, max_waiting: int, name: str) -> None:
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
        entry = _Entry(future, partial(work, *arguments, **keywords))
        self._add(tenant, entry)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._changed:
                self._drop(tenant, entry)
            raise

    async def finish(self, tenant: str, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """The same for the end of an answer. It is never refused: answers are bounded in number themselves.

        It comes before the tenant's other work, and is done also if nobody waits for it any more.
        """
        return await asyncio.wrap_future(self.start(tenant, work, *arguments, **keywords))

    def start(self, tenant: str, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> Future[T]:
        """The same for work that nobody has to wait for."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._add(tenant, _Entry(future, partial(work, *arguments, **keywords)))
        return future

    def _add(self, tenant: str, entry: _Entry) -> None:
        with self._changed:
            own = self._waiting.setdefault(tenant, deque())
            first_request = next((index for index, other in enumerate(own) if not other.future.running()), len(own))
            own.insert(first_request if entry.future.running() else len(own), entry)
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

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                tenant = next(iter(self._waiting))
                own = self._waiting.pop(tenant)
                entry = own.popleft()
                if own:
                    self._waiting[tenant] = own  # after the others
            future, work = entry.future, entry.work
            if future.running() or future.set_running_or_notify_cancel():  # otherwise whoever asked for it has gone
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
                    future.set_exception(error)
            del entry, future, work, own  # a prompt must not be held until the next one comes
