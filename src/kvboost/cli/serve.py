"""``kvboost serve``: an OpenAI-compatible endpoint around a model.

Called by :mod:`kvboost.cli.main`. Invariants: keys come from files, never from a flag, as flags are seen by everybody
on the machine; what cannot work is said before the model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvboost.cli.warm import Model
from kvboost.cli.settings import Option, Settings, with_settings
from kvboost.cli.output import note
from kvboost.errors import ConfigError

_SHADOW_SHARE = 0.02  # of the requests that used moved text are answered both ways

_OWN = (
    Option("host", str, "Listen on this address; others than this machine's own need keys.", default="127.0.0.1"),
    Option("port", int, "0 takes a free one.", default=8000),
    Option("name", str, "What clients call the model (default: the last part of MODEL)."),
    Option("api_key_file", str, "A file with one API key per line; each is a tenant of its own."),
    Option("admin_key_file", str, "A file with the key for /metrics and /v1/cache."),
    Option("allow_open", bool, "Let other machines in without a key.", default=False),
    Option("max_running", int, "Requests computed side by side.", default=16),
    Option("max_waiting", int, "Further requests are refused with a 429.", default=256),
    Option("kv_bytes", str, "KV that running requests may come to hold together.", default="2GiB"),
    Option(
        "deterministic",
        bool,
        "The same request, with a seed or temperature 0, gives the same bytes, alone or among others.",
        default=False,
    ),
    Option("drain_seconds", float, "For requests that run when the end is asked for.", default=30.0),
)


@with_settings(*_OWN, section="serve")
def serve(model: Model, *, settings: Settings) -> None:
    """Serve a model to any OpenAI client, with the cache shared by all requests of a key.

    Ends at SIGTERM or Ctrl-C, once what runs is answered.
    """
    try:
        from kvboost.serve.main import ServeSettings
        from kvboost.serve.main import main as serve_model
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error.name} is missing; install it with pip install "kvboost[serve]"') from error
    engine = settings.engine()
    engine.setdefault("shadow_share", _SHADOW_SHARE)
    loading = {name: engine.pop(name) for name in ("dtype", "device") if name in engine}
    own: dict[str, Any] = {option.name: settings[option.name] for option in _OWN}
    api_keys = _keys(own.pop("api_key_file"))
    admin_keys = _keys(own.pop("admin_key_file"))
    if len(admin_keys) > 1:
        raise ConfigError("the file for the admin key holds several lines; give one key")
    note(f"loading {model}")
    served = ServeSettings(
        model=model,
        api_keys=api_keys,
        admin_key=admin_keys[0] if admin_keys else None,
        engine=engine,
        **own,
        **loading,
    )
    serve_model(
        served,
        ready=lambda host, port: note(
            f"serving on http://{host}:{port} (a page to look at; OpenAI clients: /v1, model {served.served_name})"
        ),
        warn=note,
    )


def _keys(file: str | None) -> list[str]:
    """The lines of a file of keys."""
    if file is None:
        return []
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give a text file with one key per line") from error
    if not lines:
        raise ConfigError(f"{file} holds no key; write one per line, for example from `openssl rand -hex 32`")
    return lines
