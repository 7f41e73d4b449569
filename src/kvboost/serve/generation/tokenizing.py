"""Tokenises prompts in threads of their own: one for those of large requests, one for all others.

Used by the endpoints. Invariant: a short prompt never waits for a long one to be tokenised. In each thread the tenants
take turns, and in that of large requests they rest for others (:class:`kvboost.serve.security.fair_pool.Pace`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvboost.serve.security.bodies import request_bytes_now
from kvboost.serve.security.fair_pool import FairPool

_LARGE_BYTES = 16 * 2**10  # a text of as many characters is tokenised in some 10 ms

T = TypeVar("T")


class Tokenizing:
    """Runs what tokenises. Raises what a :class:`FairPool` raises."""

    def __init__(self, *, max_waiting: int, large: FairPool) -> None:
        """``large`` reads large requests."""
        self._short = FairPool(max_waiting=max_waiting, name="kvboost-tokenize")
        self._long = large

    @property
    def waiting(self) -> int:
        """Work that has not begun, large bodies to be parsed included."""
        return self._short.waiting + self._long.waiting

    async def run(self, tenant: str, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """What ``work`` returns or raises. Raises a 429 if too many wait."""
        return await self._pool(request_bytes_now()).run(tenant, work, *arguments, **keywords)

    async def finish(self, tenant: str, size: int, work: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """The same for the end of an answer to a prompt of ``size`` characters. It is never refused."""
        return await self._pool(size).finish(tenant, work, *arguments, **keywords)

    def _pool(self, size: int) -> FairPool:
        return self._long if size > _LARGE_BYTES else self._short

    def close(self) -> None:
        """Begin nothing more."""
        self._short.close()
