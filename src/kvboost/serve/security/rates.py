"""How many requests and tokens a key may spend per minute.

:class:`RateLimit` runs after the gate, and the server's :class:`Service` spends what a generation costs. Used on the
event loop only, so it needs no lock. Invariants: a budget fills evenly, up to one minute's worth; a key is let in
unless it has overdrawn one; what a request costs beyond what is left is paid back before the next one; there is one
budget for each valid key, so clients cannot grow the memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.serve.errors import ApiError
from kvboost.serve.security.limits import Limits

_MINUTE_S = 60.0


class _Budget:
    """So much per minute. May be overdrawn."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._left, self._at = float(per_minute), now

    def left(self, now: float) -> float:
        """What is there now; below zero if it is overdrawn."""
        filled = (now - self._at) * self.per_minute / _MINUTE_S
        self._left, self._at = min(self._left + filled, float(self.per_minute)), now
        return self._left

    def spend(self, amount: int, now: float) -> None:
        """So much less, whether it is there or not."""
        self._left = self.left(now) - amount

    def seconds_until(self, wanted: float, now: float) -> float:
        """Until so much is there."""
        return max(0.0, wanted - self.left(now)) * _MINUTE_S / self.per_minute


class Rates:
    """The budgets of all keys."""

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        limited = {"requests": limits.max_requests_per_minute, "tokens": limits.max_tokens_per_minute}
        self._limits = {name: limit for name, limit in limited.items() if limit is not None}
        self._clock = clock
        self._budgets: dict[tuple[str, str], _Budget] = {}

    def _budget(self, key_id: str, name: str, now: float) -> _Budget:
        made = self._budgets.get((key_id, name))
        if made is None:
            made = self._budgets[key_id, name] = _Budget(self._limits[name], now)
        return made

    def enter(self, key_id: str) -> None:
        """One more request of a key. Raises a 429 if it has nothing left."""
        now = self._clock()
        for name, limit in self._limits.items():
            wanted = 1.0 if name == "requests" else 0.0
            wait = self._budget(key_id, name, now).seconds_until(wanted, now)
            if wait > 0:
                raise ApiError(
                    429,
                    f"this key may use {limit} {name} per minute; try again in {math.ceil(wait)} seconds",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(math.ceil(wait)), **self.headers(key_id)},
                )
        if "requests" in self._limits:
            self._budget(key_id, "requests", now).spend(1, now)

    def spend(self, key_id: str, tokens: int) -> None:
        """A request of a key has read or written so many tokens."""
        if "tokens" in self._limits:
            now = self._clock()
            self._budget(key_id, "tokens", now).spend(tokens, now)

    def keep(self, key_ids: Collection[str]) -> None:
        """Forget all keys but these."""
        self._budgets = {of: budget for of, budget in self._budgets.items() if of[0] in key_ids}

    def headers(self, key_id: str) -> dict[str, str]:
        """What is left, in OpenAI's headers; none without limits."""
        now, headers = self._clock(), {}
        for name, limit in self._limits.items():
            budget = self._budget(key_id, name, now)
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(budget.left(now))))
            headers[f"x-ratelimit-reset-{name}"] = f"{budget.seconds_until(limit, now):.3f}s"
        return headers


class RateLimit:
    """Lets requests to ``paths`` through while their key has something left. Runs after the gate."""

    def __init__(self, app: ASGIApp, *, rates: Rates, paths: Collection[str]) -> None:
        self._app, self._rates, self._paths = app, rates, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        key_id = scope["state"]["caller"].key_id
        try:
            self._rates.enter(key_id)
        except ApiError as error:
            await JSONResponse(error.body(scope["path"]), error.status, headers=error.headers)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._rates.headers(key_id))
            await send(message)

        await self._app(scope, receive, with_headers)
