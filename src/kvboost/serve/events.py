"""Publishes what the engine's stores gain and lose as KV events, if the server's config asks for it.

Used by :mod:`kvboost.serve.run`. Invariant: a server that cannot publish says so before it takes requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvboost.engine import KVBoost
from kvboost.errors import ConfigError, with_extra
from kvboost.serve.config import ServerConfig
from kvboost.serve.security.auth import is_loopback

if TYPE_CHECKING:
    from kvboost.fleet.publish import EventPublisher

_log = logging.getLogger("kvboost.serve")


@contextmanager
def published_events(engine: KVBoost, config: ServerConfig) -> Iterator[None]:
    """While inside, whoever subscribes is told what all tenants' stores hold. Raises ConfigError if that cannot be."""
    if config.kv_events is None:
        yield
        return
    with _publisher(config) as publisher:
        from kvboost.fleet.events import MEDIUM_CPU, MEDIUM_GPU, StoreEvents

        medium = MEDIUM_CPU if engine.model.device.type == "cpu" else MEDIUM_GPU
        engine.listen(StoreEvents(publisher.publish, memory_medium=medium))
        if not _stays_here(publisher.endpoint):
            _log.warning(
                "KV events on %s have the token ids of all prompts in them, and whoever can connect can read them; "
                "keep them in a network of your own",
                publisher.endpoint,
            )
        yield


def check_events(config: ServerConfig) -> None:
    """Refuse addresses that cannot be used, before a model is loaded."""
    if config.kv_events is not None:
        _publisher(config).close()


def _stays_here(endpoint: str) -> bool:
    scheme, _, address = endpoint.partition("://")
    return scheme == "ipc" or is_loopback(address.rpartition(":")[0])


def _publisher(config: ServerConfig) -> EventPublisher:
    try:
        from kvboost.fleet.publish import EventPublisher
    except ModuleNotFoundError as error:
        raise ConfigError(f"KV events need {error.name}, which is missing; {with_extra('fleet')}") from error
    assert config.kv_events is not None
    return EventPublisher(config.kv_events, replay_endpoint=config.kv_events_replay, topic=config.kv_events_topic)
