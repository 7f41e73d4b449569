"""Request routers of Ray Serve that a fleet is measured with instead of ours. Imported in Ray's processes only."""

from __future__ import annotations

import itertools
import json
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class RoundRobin(RequestRouter):  # type: ignore[misc]
    """One after the other, in the order of their names; the others only if that one cannot take the request."""

    def initialize_state(self, **_: Any) -> None:
        """Called by Serve."""
        self._turns = itertools.count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Serve for every request, again after a while if nobody could take it."""
        ordered = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        if not ordered:
            return []
        turn = next(self._turns) % len(ordered)
        return [[replica] for replica in (*ordered[turn:], *ordered[:turn])]


class PrefixAffinity(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's own, with its own settings. Only where a request has its prompt is ours: it looks for an attribute."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        """One character for each token."""
        _, body = pending_request.args
        prompt = json.loads(body or b"{}").get("prompt") or [0]
        return "".join(map(chr, prompt))
