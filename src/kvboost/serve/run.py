"""Runs a server until a signal ends it, or it cannot answer any more.

Called from Python and by ``kvboost serve``. Invariants: SIGTERM and SIGINT end it with nothing cut off that
could be finished in ``drain_seconds``, everything released, and no error. A runner that has failed ends it with one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from kvboost.engine import KVBoost
from kvboost.errors import ClosedError, ConfigError, with_extra
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve.app import make_app
from kvboost.serve.config import ServerConfig
from kvboost.serve.generation.service import Service
from kvboost.serve.process import busy_interpreter, with_enough_files
from kvboost.serve.security.auth import Keys, check_binding, is_loopback
from kvboost.serve.security.connection import bounded_connection
from kvboost.serve.security.limits import Limits

if TYPE_CHECKING:
    from kvboost.fleet.publish import EventPublisher

_log = logging.getLogger("kvboost.serve")


class _Server(uvicorn.Server):
    """uvicorn's server; a signal is the end of it, not of the process.

    uvicorn itself stops listening at once. This one listens as long as requests run, to say that it takes no more.
    """

    def __init__(self, config: uvicorn.Config, service: Service, *, drain_seconds: float) -> None:
        super().__init__(config)
        self._service, self._drain_seconds = service, drain_seconds
        self._deadline: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps none

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain. Another signal stops listening now, a second Ctrl-C everything."""
        if self._deadline is None:
            return self._drain()
        self.should_exit = True
        super().handle_exit(sig, frame)

    def _drain(self) -> None:
        self._service.draining = True
        self._deadline = time.monotonic() + self._drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second: whether to stop."""
        if self._deadline is None and not self._service.runner.load().alive:
            self._drain()  # nobody else would end a server that answers with errors only
        if self._deadline is not None and (not self._service.streams.held or time.monotonic() >= self._deadline):
            self.should_exit = True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at a signal and do not raise it again, so that the exit code is 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGTERM, signal.SIGINT)}
        if hasattr(signal, "SIGHUP"):  # Windows has none
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(self._hung_up))
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _hung_up(self) -> None:
        task = asyncio.get_running_loop().create_task(_read_keys_again(self._service))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new, let what runs finish in the time that is left."""
        self._service.draining = True
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            self.config.timeout_graceful_shutdown = max(1, math.ceil(left))  # what is done still has to be sent
        await super().shutdown(sockets)


def serve(
    engine: KVBoost,
    runner: BatchRunner,
    config: ServerConfig,
    *,
    keys: Keys | None = None,
    limits: Limits | None = None,
    ready: Callable[[str, int], None] | None = None,
) -> None:
    """Answer requests until SIGTERM or SIGINT. The engine and the runner stay the caller's.

    Raises ClosedError if the runner fails, once running requests have ended.

    Args:
        engine: With a tokenizer.
        runner: Runs the jobs on that engine.
        config: Where to listen and what clients call the model (``name``).
        keys: Instead of those in the config's files.
        limits: What one client may ask for.
        ready: Called with the address once requests are taken.
    """
    keys = (
        keys
        if keys is not None
        else Keys.from_files(config.api_key_file, config.admin_key_file, secret=config.secret_file)
    )
    check_reach(config, keys)
    limits = with_enough_files(limits or Limits())
    app = app_of(engine, runner, config, keys=keys, limits=limits)
    with _listen(config) as listening, published_events(engine, config):
        if ready is not None:
            ready(config.host, int(listening.getsockname()[1]))
        files = (config.tls_cert_file, config.tls_key_file) if config.tls_cert_file and config.tls_key_file else None
        http = http_config(app, limits=limits, drain_seconds=config.drain_seconds, tls=files)
        server = _Server(http, app.state.service, drain_seconds=config.drain_seconds)
        try:
            with busy_interpreter():
                asyncio.run(server.serve(sockets=[listening]))
        finally:
            app.state.service.close()
    if (failure := runner.load().failure) is not None:
        raise ClosedError(f"{failure}; see the log, and start the server again")


def app_of(engine: KVBoost, runner: BatchRunner, config: ServerConfig, *, keys: Keys, limits: Limits) -> FastAPI:
    """The app as ``config`` wants it, with its adapters loaded. Whoever asks for it closes ``app.state.service``."""
    if config.served_model_name is None:
        raise ConfigError("clients need a name for the model; give ServerConfig(served_model_name=...)")
    for name, path in config.adapters:
        engine.load_adapter(name, path)
    app = make_app(
        engine,
        runner,
        model_name=config.served_model_name,
        keys=keys,
        limits=limits,
        only_local_names=is_loopback(config.host),
        origins=config.cors_origin,
        root_path=config.root_path,
        adapters=[name for name, _ in config.adapters],
    )
    app.state.service.grammars.prepare()
    return app


def check_reach(config: ServerConfig, keys: Keys) -> None:
    """Refuse who could reach the server without being meant to, and a certificate that cannot be used."""
    check_binding(config.host, keys, allow_open=config.allow_open)
    if "*" in config.cors_origin and not keys and not config.allow_open:
        raise ConfigError(
            "cors_origin=* would let every web page that somebody here opens use the model; name the origins, or set "
            "an API key (--api-key-file)"
        )
    if config.tls_cert_file is not None and config.tls_key_file is not None:
        try:
            _tls_context(config.tls_cert_file, config.tls_key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{config.tls_cert_file} and {config.tls_key_file} cannot be used ({error}); give a PEM certificate "
                "chain and its key, without a password"
            ) from error


def http_config(
    app: Any, *, limits: Limits, drain_seconds: float, tls: tuple[str | Path, str | Path] | None = None
) -> uvicorn.Config:
    """How uvicorn serves: bounded connections, no log of its own, no websockets. ``tls``: certificate and key."""
    return uvicorn.Config(
        app,
        http=bounded_connection(limits, _tls_context(*tls) if tls is not None else None),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # every broken request is a warning of uvicorn's, and clients could fill a disk with them
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
        h11_max_incomplete_event_size=limits.max_header_bytes,
    )


def _tls_context(certificate: str | Path, key: str | Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, password="")  # nobody is there to ask
    return context


async def _read_keys_again(service: Service) -> None:
    before = service.keys.callers
    await asyncio.to_thread(read_keys_again, service.keys)  # a slow disk must not stop the loop
    await service.revoke(before)


def read_keys_again(keys: Keys) -> None:
    """What SIGHUP asks for; the log says how it went."""
    try:
        keys.read_again()
    except ConfigError as error:
        _log.error("the keys stay as they were: %s", error)
    else:
        count = len(keys.tenants)
        _log.info("the keys were read again: %d tenant%s", count, "" if count == 1 else "s")


def check_port(config: ServerConfig) -> None:
    """Refuse a port that is in use now, and KV events that cannot be published, before a model is loaded."""
    _listen(config).close()
    if config.kv_events is not None:
        _publisher(config).close()


def _listen(config: ServerConfig) -> socket.socket:
    try:
        return _bind(config.host, config.port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port} ({error}); choose another port") from error


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named: only then does asyncio turn off Nagle's algorithm on the connections. Else whatever is
    # written in two parts, an answer's head and its body or two tokens, waits 40 ms for the client's next ACK.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), port))
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening


@contextlib.contextmanager
def published_events(engine: KVBoost, config: ServerConfig) -> Iterator[None]:
    """While inside, subscribers learn what all tenants' stores hold. Raises ConfigError if that cannot be."""
    if config.kv_events is None:
        yield
        return
    with contextlib.closing(_publisher(config)) as publisher:
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
