"""The request router on its own: what it learns of replicas, and what it does where it cannot know."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvboost import KVBoost
from kvboost.fleet.index import pack_keys
from kvboost.fleet.route import RouteCosts
from kvboost.integrations.ray.prompts import Facts
from tests.integrations.ray.fleets import text
from tests.integrations.ray.test_prompts import _facts

_NONE = np.zeros(0, dtype=np.uint64)


@pytest.fixture(scope="module")
def facts(model: Path) -> Facts:
    """Of a replica."""
    with KVBoost.from_pretrained(str(model), cache_bytes=4 * 10**7) as engine:
        return _facts(engine)


@pytest.fixture
def router(installed: None, model: Path) -> Any:
    """As a front has it, before any replica is there."""
    from kvboost.integrations.ray.router import ContentRouter

    class Alone(ContentRouter):
        """Without Serve's controller: every queue is empty, or as the test says."""

        lengths: dict[str, int]

        @property
        def replica_queue_len_cache(self) -> Any:
            return SimpleNamespace(get=lambda replica: self.lengths.get(replica.unique_id))

    made = Alone.__new__(Alone)
    made.lengths = {}
    made.initialize_state(model=str(model), model_name="tiny", key_files=[None, None, None])
    return made


def _stats(keys: np.ndarray, *, load: float = float("inf"), compute: float = 1e-3) -> dict[str, Any]:
    costs = RouteCosts(compute=compute, move=1e-4, load=load)
    return {"keys": pack_keys(keys), "costs": asdict(costs)}


def _replicas(*names: str) -> list[Any]:
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


def _pending(body: dict[str, Any], path: str = "/v1/completions") -> Any:
    scope = {"path": path, "headers": []}
    return SimpleNamespace(
        metadata=SimpleNamespace(internal_request_id=json.dumps(body)[:80]),
        args=(scope, json.dumps({"model": "tiny", **body}).encode()),
        routing_context=SimpleNamespace(should_backoff=False),
    )


def _ask(router: Any, pending: Any, *names: str) -> list[list[str]]:
    ranks = asyncio.run(router.choose_replicas(_replicas(*names), pending))
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_a_full_fleet_is_asked_again_only_after_a_while(router: Any, names: tuple[str, ...]) -> None:
    pending = _pending({"prompt": "x"})
    _ask(router, pending, *names)
    assert pending.routing_context.should_backoff


def test_whoever_holds_the_prompt_is_chosen(router: Any, facts: Facts) -> None:
    pending = _pending({"prompt": text(1, 300)})
    router._learn("empty", asdict(facts), _stats(_NONE))
    asked = asyncio.run(router._prompts_of(pending))[repr(facts)]
    router._learn("holds it", asdict(facts), _stats(asked.prefix_keys))
    for _ in range(5):
        assert _ask(router, pending, "empty", "holds it") == [["holds it"], ["empty"]]


def test_replicas_with_new_weights_get_requests_while_old_ones_hold_the_prompt(
    router: Any,
    facts: Facts,
) -> None:
    old, new = facts, replace(facts, approximate=True)  # or other weights
    pending = _pending({"prompt": text(1, 300)})
    router._learn("new", asdict(new), _stats(_NONE))
    router._learn("old", asdict(old), _stats(_NONE))
    asked = asyncio.run(router._prompts_of(pending))[repr(old)]
    router._learn("old", asdict(old), _stats(asked.prefix_keys))
    replicas = {replica.replica_id.unique_id: replica for replica in _replicas("old", "new")}
    router._mean_seconds = 10.0  # for each that waits
    assert router._choose(router._prompts[pending.metadata.internal_request_id], replicas).replica == "old"
    router.lengths = {"old": 5}
    assert router._choose(router._prompts[pending.metadata.internal_request_id], replicas).replica == "new"


def test_what_the_shared_tier_holds_is_forgotten_now_and_then_not_at_every_update(
    router: Any,
    facts: Facts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvboost.integrations.ray import router as module

    monkeypatch.setattr(module, "_MAX_SHARED_KEYS", 1000)
    facts = replace(facts, shares=True)
    rng = np.random.default_rng(0)
    keys = [rng.integers(1, 2**63, 300, dtype=np.uint64) for _ in range(4)]
    for number in range(3):
        router._learn(f"r{number}", asdict(facts), _stats(keys[number]))
    shared = module._SHARED
    assert router._index.held_by(shared, np.concatenate(keys[:3])).all()
    router._learn("r3", asdict(facts), _stats(keys[3]))  # one too many
    assert not router._index.held_by(shared, np.concatenate(keys[:3])).any()
    for number in range(3):  # told again: not wiped by each other
        router._learn(f"r{number}", asdict(facts), _stats(keys[number][:150]))
    assert router._index.held_by(shared, np.concatenate([keys[3], *(own[:150] for own in keys[:3])])).all()


def test_a_replica_that_has_loaded_nothing_says_nothing_about_loading(router: Any, facts: Facts) -> None:
    router._learn("has loaded", asdict(facts), _stats(np.array([5], dtype=np.uint64), load=1e-4))
    router._learn("is new", asdict(facts), _stats(np.array([6], dtype=np.uint64)))
    assert router._router.costs.load == 1e-4


def test_a_prompt_whose_reading_fails_goes_where_the_queue_is_short(
    router: Any,
    facts: Facts,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router._learn("a", asdict(facts), _stats(np.array([5], dtype=np.uint64)))

    def fails(scope: Any, body: bytes) -> Any:
        raise ZeroDivisionError("in a template")

    monkeypatch.setattr(router, "_keyed", fails)
    with caplog.at_level(logging.WARNING):
        (rank,) = _ask(router, _pending({"prompt": "x"}), "a", "b")
    assert set(rank) == {"a", "b"}
    assert "cannot be read here" in caplog.text
