"""``kvboost serve``: an OpenAI-compatible endpoint around a model.

Called by :mod:`kvboost.cli.main`. Invariants: keys come from files, never from a flag, as flags are seen by everybody
on the machine; what cannot work is said before the model is loaded.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost.cli.flags import Model, with_settings
from kvboost.cli.output import log_with_time, note_with_time
from kvboost.cli.settings import Settings
from kvboost.config import RunnerConfig
from kvboost.errors import ClosedError, ConfigError, with_extra
from kvboost.integrations.ray.config import RayConfig, need_ray
from kvboost.serve.config import ServerConfig
from kvboost.serve.process import share_malloc
from kvboost.serve.security.limits import Limits

if TYPE_CHECKING:
    from kvboost.serve.security.auth import Keys

_SHADOW_SHARE = 0.02  # of the requests with non-prefix reuse are answered both ways


@with_settings("serve", "ray")
def serve(
    model: Model,
    *,
    ray: Annotated[bool, typer.Option("--ray", help="Run copies of the model under Ray Serve.")] = False,
    settings: Settings,
) -> None:
    """Serve a model to any OpenAI client, with the cache shared by all requests of a key.

    Ends at SIGTERM or Ctrl-C, once running requests are answered. Ends with 1 if no more requests can be answered.
    """
    if not ray and (given := settings.given(RayConfig)):
        raise ConfigError(f"{', '.join(given)} is for a fleet; add --ray, or leave it out")
    share_malloc()
    log_with_time()
    with _at_hangup(signal.SIG_IGN):  # until there are keys to read again
        if ray:
            _serve_fleet(model, settings)
        else:
            _serve(model, settings)


@contextmanager
def _at_hangup(do: Any) -> Iterator[None]:
    """What SIGHUP does inside. By itself it would end the process."""
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():  # Windows has none
        yield
        return
    before = signal.signal(signal.SIGHUP, do)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@dataclass(frozen=True)
class _Prepared:
    """What a server is made of, checked as far as that goes without the model."""

    config: ServerConfig
    limits: Limits
    keys: Keys
    engine: dict[str, Any]


def _prepare(model: str, settings: Settings) -> _Prepared:
    try:
        from kvboost.serve.run import check_reach
        from kvboost.serve.security.auth import Keys
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing; {with_extra('serve')}") from error
    from kvboost.hf.adapters import check_adapter

    config, limits = settings.of(ServerConfig), settings.of(Limits)
    config = replace(config, served_model_name=config.served_model_name or model_name(model))
    keys = Keys.from_files(config.api_key_file, config.admin_key_file, secret=config.secret_file)
    check_reach(config, keys)
    for name, path in config.adapters:
        check_adapter(name, path)
    engine_settings = settings.engine()
    if engine_settings.get("quality", "exact") not in ("exact", "auto"):
        engine_settings = {"shadow_share": _SHADOW_SHARE, **engine_settings}
    return _Prepared(config, limits, keys, engine_settings)


def _say_address(config: ServerConfig, host: str, port: int) -> None:
    scheme = "http" if config.tls_cert_file is None else "https"
    note_with_time(
        f"serving on {scheme}://{host}:{port}{config.root_path} "
        f"(a page to look at; OpenAI clients: /v1, model {config.served_model_name})"
    )


def _serve_fleet(model: str, settings: Settings) -> None:
    need_ray()
    prepared, fleet = _prepare(model, settings), settings.of(RayConfig)
    if prepared.config.port == 0:
        raise ConfigError("port=0 is not for a fleet: Ray Serve listens on a port that is known before; give one")
    from kvboost.engine.assembly import split_settings
    from kvboost.hf.loading import ModelSource
    from kvboost.integrations.ray import build_app, run_app
    from kvboost.serve.run import check_port

    # What replicas would refuse, before Ray starts and hides why in their logs. A cluster's machines have other files.
    if not os.environ.get("RAY_ADDRESS"):
        split_settings(prepared.engine)
        ModelSource(model).path  # noqa: B018 - raises for a folder that is not there
    check_port(prepared.config)
    note_with_time(f"starting {fleet.replicas} of {model} under Ray Serve")
    app = build_app(
        model,
        engine=prepared.engine,
        server=prepared.config,
        runner=settings.of(RunnerConfig),
        limits=prepared.limits,
        ray_config=fleet,
    )
    run_app(app, server=prepared.config, ray_config=fleet, ready=partial(_say_address, prepared.config))


def _serve(model: str, settings: Settings) -> None:
    note_with_time("importing torch and Transformers")  # which may take seconds
    prepared = _prepare(model, settings)
    config, keys = prepared.config, prepared.keys
    from kvboost.engine import KVBoost
    from kvboost.engine.estimate import memory_shortfall
    from kvboost.scheduler.runner import BatchRunner
    from kvboost.serve.run import check_port, read_keys_again
    from kvboost.serve.run import serve as serve_engine

    log_with_time("transformers")
    check_port(config)
    # In a thread: a handler interrupts code that may hold the lock of the log.
    with _at_hangup(lambda *_: threading.Thread(target=read_keys_again, args=(keys,), daemon=True).start()):
        note_with_time(f"loading {model}")
        with (
            KVBoost.from_pretrained(model, **prepared.engine) as engine,
            BatchRunner(engine, **asdict(settings.of(RunnerConfig))) as runner,
        ):
            if (short := memory_shortfall(engine.parts, engine.session, kv_bytes=runner.kv_bytes)) is not None:
                note_with_time(short)
            ready = partial(_say_address, config)
            try:
                serve_engine(engine, runner, config, keys=keys, limits=prepared.limits, ready=ready)
            except ClosedError as error:
                runner.close()
                if runner.load().step_seconds:
                    # A step that hangs cannot be ended, and whatever is closed now may wait for what it holds.
                    note_with_time(f"kvboost serve: {error}")
                    os._exit(1)
                raise


def model_name(model: str) -> str:
    """What clients call a model that was given no name: the last part of its folder or hub name."""
    return Path(os.path.abspath(model)).name  # "." has no name of its own
