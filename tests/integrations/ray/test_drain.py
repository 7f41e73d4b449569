"""A replica that is told to go, over real HTTP and a real Redis."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.common.servers import redis_server
from kvboost import KVBoost
from tests.integrations.ray.fleets import fleet, text

pytestmark = pytest.mark.usefixtures("cluster")


def test_a_replica_that_goes_writes_what_waits(model: Path) -> None:
    prompt = text(4)
    with redis_server() as server:
        settings = {"cache_bytes": 4 * 10**7, "remote_url": server.url}
        with fleet(model, engine=settings, replicas=1) as running:
            assert running.complete("x").status_code == 200
            server.process.send_signal(signal.SIGSTOP)
            try:
                assert running.complete(prompt).status_code == 200
            finally:
                server.process.send_signal(signal.SIGCONT)
        with KVBoost.from_pretrained(str(model), **settings) as engine:
            found = engine.prefill(prompt).reuse
            stored = found.exact_tokens + found.declined_tokens
            assert stored > 0.8 * (found.exact_tokens + found.moved_tokens + found.fresh_tokens)
