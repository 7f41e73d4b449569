"""One copy of the model under Ray Serve: the same HTTP app as ``kvboost serve``, asked through a Serve handle.

Made by Ray Serve from :func:`kvboost.integrations.ray.app.build_app`. Invariants: a replica that has to go answers
what it has begun, then writes what waits for the tiers below; what it sends the router is a hint, never a promise.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from ray import serve
from starlette.types import Message

from kvboost.config import RunnerConfig
from kvboost.engine import KVBoost
from kvboost.fleet.index import keys_of_blocks, pack_keys
from kvboost.fleet.route import RouteCosts
from kvboost.integrations.ray.asgi import LocalApp
from kvboost.integrations.ray.prompts import Facts
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve.config import ServerConfig
from kvboost.serve.process import busy_interpreter
from kvboost.serve.run import app_of
from kvboost.serve.security.auth import Keys
from kvboost.serve.security.limits import Limits

_MAX_BLOCKS = 2**16  # that one replica names: a megabyte every few seconds
_OWN_TIERS = ("host", "disk")  # the others are shared by all replicas
_RECOMPUTE_RATIO = 0.15  # of repositioned tokens, where the engine chooses it itself


class Replica:
    """The app around an engine of its own. Ray Serve calls every method."""

    def __init__(
        self, model: str, *, engine: Mapping[str, Any], server: ServerConfig, runner: RunnerConfig, limits: Limits
    ) -> None:
        self._open = ExitStack()
        self._engine = self._open.enter_context(KVBoost.from_pretrained(model, **engine))
        jobs = self._open.enter_context(BatchRunner(self._engine, **asdict(runner)))
        keys = Keys.from_files(server.api_key_file, server.admin_key_file, secret=server.secret_file)
        app = app_of(self._engine, jobs, server, keys=keys, limits=limits)
        self._service = app.state.service
        self._open.callback(self._service.close)
        self._open.enter_context(busy_interpreter())
        self._app = LocalApp(app)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Answer one HTTP request, message by message."""
        async for messages in self._app.exchange(scope, body):
            yield messages

    async def answer_whole(self, scope: dict[str, Any], body: bytes) -> tuple[str, list[Message]]:
        """The same at once, with the name of this replica: for requests that every replica gets."""
        messages = [message async for some in self._app.exchange(scope, body) for message in some]
        return serve.get_replica_context().replica_id.unique_id, messages

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica for which this raises."""
        for path in ("/health", "/ready"):
            if (status := await self._app.ask("GET", path)) != 200:
                raise RuntimeError(f"GET {path} was answered with {status}; the replica's log says why")

    def record_replica_metadata(self) -> dict[str, Any]:
        """Called by Serve once, for the routers."""
        config, session = self._engine.config, self._engine.session
        if session is None or not isinstance(config.chunking, str):
            return {}  # nothing is reused here, or cut by rules that a router does not have
        facts = Facts(
            fingerprint=session.prefiller.keys.fingerprint(),
            chunking=config.chunking,
            chunk_tokens=config.chunk_tokens,
            approximate=config.quality != "exact",
            shares=config.remote_url is not None,
        )
        return asdict(facts)

    def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve every few seconds, for the routers."""
        session = self._engine.session
        if session is None:
            return {}
        states = self._engine.tier_states()
        config, work = self._engine.config, [tier.work for name, tier in states.items() if name not in _OWN_TIERS]
        loaded = config.chunk_tokens * sum(tier.hits for tier in work)
        load = sum(tier.load_seconds for tier in work) / loaded if loaded else math.inf
        ratio = config.recompute_ratio if config.recompute_ratio is not None else _RECOMPUTE_RATIO
        costs = RouteCosts.of(session.prefiller.costs, recompute_ratio=ratio, load=load)
        keys = keys_of_blocks(self._engine.held_keys(_MAX_BLOCKS))
        return {"keys": pack_keys(keys), "costs": asdict(costs)}

    async def __del__(self) -> None:
        """Called by Serve when no request runs any more, before the process ends."""
        if hasattr(self, "_app"):  # else it was never ready
            self._service.draining = True
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._engine.flush()
        self._open.close()
