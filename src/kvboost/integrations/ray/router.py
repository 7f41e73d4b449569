"""Ray Serve's request router for replicas that hold KV: where a prompt's first token is expected soonest.

Named in the deployment's ``RequestRouterConfig``; Serve makes one in every front. Replicas send what they hold as their
routing stats. :mod:`kvboost.fleet.route` chooses. Invariants: no torch; whoever knows nothing lets Serve choose of two
drawn replicas the one with the shorter queue; a choice that cannot take the request falls back to the others.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvboost.core.chunking import make_chunker
from kvboost.core.keys import token_array
from kvboost.errors import ConfigError
from kvboost.extend import Chunker
from kvboost.fleet.index import FleetIndex, ShortKeys, unpack_keys
from kvboost.fleet.route import Choice, RouteCosts, RoutePrompt, Router
from kvboost.hf.breaks import break_table, light_tokenizer
from kvboost.integrations.ray.prompts import AskedPrompt, Facts, PromptReader
from kvboost.serve.security.auth import Keys

_log = logging.getLogger("kvboost.serve")
_SHARED = "the shared tier"
_MAX_SHARED_KEYS = 2**22  # then what is believed to be in the shared tier is forgotten, and learnt again
_MAX_PENDING = 1024  # prompts kept while they are routed


@dataclass(frozen=True)
class _Kind:
    """Replicas that cut and name prompts alike: all of them, but for a rolling update."""

    facts: Facts
    chunker: Chunker
    reader: PromptReader

    def prompt(self, asked: AskedPrompt) -> RoutePrompt:
        """The keys that these replicas would look for."""
        ids = token_array(asked.token_ids)
        return RoutePrompt.of(self.facts.root(asked.tenant), ids, self.chunker.cut(ids, asked.boundaries))


class ContentRouter(RequestRouter):  # type: ignore[misc]
    """Chooses by what replicas hold, wherever in the prompt it stands, and by their queues."""

    def initialize_state(self, *, model: str, model_name: str, key_files: Sequence[str | None]) -> None:
        """Called by Serve with the config's ``request_router_kwargs``."""
        self._model_name = model_name
        api_keys, admin_key, secret = key_files
        self._keys = Keys.from_files(api_keys, admin_key, secret=secret)
        self._index = FleetIndex()
        self._router: Router | None = None
        self._kinds: dict[str, _Kind | None] = {}
        self._kind_of: dict[str, str] = {}
        self._sent: dict[str, bytes] = {}
        self._costs: dict[str, RouteCosts] = {}
        self._shared_keys = 0
        self._prompts: OrderedDict[str, dict[str, RoutePrompt]] = OrderedDict()
        self._mean_seconds = 0.0
        try:
            self._tokenizer = light_tokenizer(model)
        except ConfigError as error:
            self._tokenizer = None
            _log.warning("requests go to the shorter of two queues, whatever replicas hold: %s", error)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve whenever replicas come, go or send something."""
        there = {replica.replica_id.unique_id for replica in replicas}
        for gone in self._kind_of.keys() - there:
            del self._kind_of[gone]
            self._sent.pop(gone, None)
            self._costs.pop(gone, None)
            self._index.forget(gone)
        for replica in replicas:
            if self._tokenizer is not None and replica.replica_metadata:
                self._learn(replica.replica_id.unique_id, replica.replica_metadata, replica.routing_stats)
        super().update_replicas(replicas)

    def _learn(self, name: str, metadata: dict[str, Any], stats: dict[str, Any]) -> None:
        facts = Facts.from_dict(metadata)
        spec = repr(facts)
        if spec not in self._kinds:
            self._kinds[spec] = self._kind(facts)
        self._kind_of[name] = spec
        if not stats or self._sent.get(name) == stats["keys"]:
            return
        self._sent[name] = stats["keys"]
        keys = unpack_keys(stats["keys"])
        self._index.replace(name, keys)
        if facts.shares:
            self._share(keys)
        self._costs[name] = RouteCosts(**stats["costs"])
        costs = RouteCosts.median(self._costs.values())
        if self._router is None:
            self._router = Router(self._index, costs, shared=_SHARED, seed=random.getrandbits(32))
        self._router.costs = costs

    def _kind(self, facts: Facts) -> _Kind | None:
        breaks = break_table(self._tokenizer) if facts.chunking == "natural" else None
        chunker = make_chunker(facts.chunking, size=facts.chunk_tokens, breaks=breaks)
        if chunker.spec != facts.fingerprint.chunker:
            _log.warning("replicas cut prompts otherwise than this router (%s); nothing is known of them", chunker.spec)
            return None
        reader = PromptReader(self._tokenizer, min_gap=chunker.min_tokens, model_name=self._model_name, keys=self._keys)
        return _Kind(facts, chunker, reader)

    def _share(self, keys: ShortKeys) -> None:
        new = keys[~self._index.held_by(_SHARED, keys)]
        self._shared_keys += len(new)
        if self._shared_keys > _MAX_SHARED_KEYS:
            self._index.replace(_SHARED, keys)
            self._shared_keys = len(keys)
        else:
            self._index.add(_SHARED, new)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Serve for every request, again after a while if nobody could take it."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # before Serve asks again, if nobody has room
        if pending_request is None or self._router is None or len(candidate_replicas) < 2:
            return [_two(candidate_replicas)]
        prompts = await self._prompts_of(pending_request)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        choice = self._choose(prompts, by_name)
        if choice is None:
            return [_two(candidate_replicas)]
        chosen = by_name.pop(choice.replica)
        self._mean_seconds += 0.1 * (choice.seconds - self._mean_seconds)
        return [[chosen], list(by_name.values())]

    def _choose(self, prompts: dict[str, RoutePrompt], by_name: dict[str, RunningReplica]) -> Choice | None:
        """The best of all replicas; None if nothing tells them apart."""
        assert self._router is not None
        choices: list[Choice] = []
        for spec, prompt in prompts.items():
            queues = {
                name: self._mean_seconds * (self.replica_queue_len_cache.get(replica.replica_id) or 0)
                for name, replica in by_name.items()
                if self._kind_of.get(name) == spec
            }
            if queues:
                kind = self._kinds[spec]
                approximate = kind is not None and kind.facts.approximate
                choices.append(self._router.choose(prompt, queues=queues, approximate=approximate))
        # Once anybody holds something, all count: else new replicas of a rolling update would get nothing.
        if not any(choice.known for choice in choices):
            return None
        return min(choices, key=lambda choice: choice.seconds + choice.queue_seconds)

    async def _prompts_of(self, pending: PendingRequest) -> dict[str, RoutePrompt]:
        """The keys of a request's prompt, for each kind of replica."""
        request = pending.metadata.internal_request_id
        if request not in self._prompts:
            scope, body = pending.args
            # A long prompt takes milliseconds to tokenise, and other requests are routed meanwhile.
            try:
                self._prompts[request] = await asyncio.to_thread(self._keyed, scope, body)
            except Exception as error:  # noqa: BLE001 - whatever a template does, Serve must answer this request
                _log.warning("a prompt cannot be read here, and goes to the shorter of two queues: %r", error)
                self._prompts[request] = {}
            while len(self._prompts) > _MAX_PENDING:
                self._prompts.popitem(last=False)
        return self._prompts[request]

    def _keyed(self, scope: Any, body: bytes) -> dict[str, RoutePrompt]:
        prompts: dict[str, RoutePrompt] = {}
        for spec in set(self._kind_of.values()):
            kind = self._kinds[spec]
            if kind is not None:
                asked = kind.reader.read(scope, body)
                if asked is not None:
                    prompts[spec] = kind.prompt(asked)
        return prompts

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve. The replica will hold the prompt soon: before it says so, others may ask for the same."""
        prompts = self._prompts.pop(pending_request.metadata.internal_request_id, {})
        name = replica_id.unique_id
        prompt = prompts.get(self._kind_of.get(name, ""))
        if prompt is not None and len(prompt.prefix_keys):
            keys = np.unique(np.concatenate((prompt.prefix_keys, prompt.content_keys)))
            self._index.add(name, keys)


def _two(replicas: list[RunningReplica]) -> list[RunningReplica]:
    """Power of two choices: Serve takes the one with the shorter queue."""
    return random.sample(replicas, min(2, len(replicas)))
