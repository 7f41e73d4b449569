"""Runs a server until it is told to stop.

``serve`` is for Python, ``main`` for ``kvboost serve``. Invariant: SIGTERM and SIGINT end it with nothing cut off that
could be finished in ``drain_seconds``, everything released, and no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from kvboost.engine import KVBoost
from kvboost.errors import ConfigError
from kvboost.scheduler.jobs import JobRunner
from kvboost.serve.app import make_app
from kvboost.serve.generation.service import Service
from kvboost.serve.security.auth import Keys, check_binding, is_loopback
from kvboost.serve.security.connection import bounded_connection
from kvboost.serve.security.limits import Limits

_log = logging.getLogger("kvboost.serve")


class _Server(uvicorn.Server):
    """uvicorn's server; a signal is the end of it, not of the process."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at a signal and do not raise it again: who asked for the end gets exit code 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new, let what runs finish."""
        self._service.draining = True
        await super().shutdown(sockets)


def serve(
    engine: KVBoost,
    runner: JobRunner,
    *,
    model_name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_keys: Sequence[str] = (),
    admin_key: str | None = None,
    allow_open: bool = False,
    limits: Limits | None = None,
    drain_seconds: float = 30.0,
    ready: Callable[[str, int], None] | None = None,
) -> None:
    """Answer requests until SIGTERM or SIGINT. The engine and the runner stay the caller's.

    Args:
        engine: With a tokenizer.
        runner: Runs the jobs on that engine.
        model_name: What clients call the model.
        host: Other addresses than this machine's own need ``api_keys``, or ``allow_open``.
        port: 0 takes a free one.
        api_keys: Each is a tenant of its own. Without any, everybody on this machine may do everything.
        admin_key: For /metrics and /v1/cache, which API keys do not open.
        allow_open: Let everybody who can reach ``host`` use the model without a key.
        limits: What one client may ask for.
        drain_seconds: For requests that run when the end is asked for; then they are cancelled.
        ready: Called with the address once requests are taken.
    """
    keys = Keys(api_keys, admin_key=admin_key)
    check_binding(host, keys, allow_open=allow_open)
    limits = limits or Limits()
    app = make_app(engine, runner, model_name=model_name, keys=keys, limits=limits, only_local_names=is_loopback(host))
    config = http_config(app, limits=limits, drain_seconds=drain_seconds)
    try:
        listening = _bind(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another port") from error
    with listening:
        if ready is not None:
            ready(host, int(listening.getsockname()[1]))
        asyncio.run(_Server(config, app.state.service).serve(sockets=[listening]))


def http_config(app: Any, *, limits: Limits, drain_seconds: float) -> uvicorn.Config:
    """How uvicorn serves: bounded connections, no log of its own, no websockets."""
    return uvicorn.Config(
        app,
        http=bounded_connection(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # every broken request is a warning of uvicorn's, and clients could fill a disk with them
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
        h11_max_incomplete_event_size=limits.header_bytes,
    )


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), port))
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening
