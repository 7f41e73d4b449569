"""The engine's settings as a user gives them: a flag, else ``KVBOOST_...`` in the environment, else a TOML file.

Used by every command that makes an engine: ``@with_settings()`` gives it the flags and hands it a :class:`Settings`.
A TOML file has the settings by their names, and what belongs to one command in a table of its name::

    cache_dir = "~/.cache/kvboost"
    kv_cache_bits = 8

    [serve]
    port = 8080

Invariants: a name that is not known is an error and never passed over, but for environment variables, which others may
have; a password is never shown.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvboost.errors import ConfigError

_PANEL = "Engine settings (also KVBOOST_NAME in the environment, or name = value in --config)"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting."""

    name: str
    """In a TOML file; with dashes the flag, in capitals behind ``KVBOOST_`` the environment variable."""
    kind: type
    """``str``, ``int``, ``float`` or ``bool``: what the flag and the variable are read as."""
    help: str = ""
    """Settings without a help text have no flag."""
    default: Any = None
    """None: the engine decides."""
    argument: str = ""
    """What the engine calls it, if not by its name."""


ENGINE = (
    Option("cache_dir", str, "Also keep chunks in this directory; they stay there.", argument="disk_cache_dir"),
    Option("cache_bytes", str, "Memory for chunks, such as 2GiB."),
    Option("remote_url", str, "Also keep chunks in this Redis: redis://HOST:PORT, or rediss:// for TLS."),
    Option("quality", str, "Reuse of moved text: exact, high, fast, or the share of answers that may differ."),
    Option("kv_cache_bits", int, "Keep KV in 16, 8 or 4 bits."),
    Option("dtype", str, "The model's dtype, as Transformers takes it."),
    Option("tenant", str, "Chunks of different tenants never meet."),
    Option(
        "weight_budget", str, "Memory for the model's weights, such as 6GB; the others are read as they are needed."
    ),
    Option("draft", str, "Proposes tokens to verify several in one pass: a smaller model, or prompt-lookup."),
    Option("kv_bytes", str, "Memory for the KV of one request, such as 512MB; the rest is paged out to disk."),
    Option("weight_dir", str),
    Option("kv_dir", str),
    Option("device", str),
    Option("strict", bool),
    Option("chunk_size", int),
    Option("chunking", str),
    Option("max_chunks", int),
    Option("workspace_bytes", str),
    Option("reuse_generated", bool),
    Option("shadow_share", float),
    Option("calibration", str),
    Option("recompute_strategy", str),
    Option("recompute_ratio", float),
    Option("recompute_overlap", int),
    Option("tenant_bytes", str),
    Option("host_cache_bytes", str),
    Option("disk_cache_bytes", str),
    Option("remote_cache_bytes", str),
    Option("remote_ttl_seconds", float),
    Option("object_url", str),
    Option("object_cache_bytes", str),
    Option("record_protection", str),
    Option("record_key_file", str),
)
"""What an engine can be told from outside Python; :class:`kvboost.EngineConfig` says what each does."""


@dataclass(frozen=True)
class Settings:
    """The settings of one command: values by name, and where each came from."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    own: Sequence[Option] = ()
    """The command's own settings, beside the engine's."""
    section: str = ""

    def engine(self) -> dict[str, Any]:
        """Keyword arguments for ``KVBoost.from_pretrained``: only what was given."""
        given = {option.argument or option.name: self.values[option.name] for option in ENGINE}
        return {name: value for name, value in given.items() if value is not None}

    def __getitem__(self, name: str) -> Any:
        """The value of a setting; None if it was not given and has no default."""
        return self.values[name]

    def show_config(self) -> str:
        """All of it as a TOML file that gives the same again, with where each value came from; passwords hidden."""
        lines = [self._line(option) for option in ENGINE]
        if self.own:
            lines += ["", f"[{self.section}]", *(self._line(option) for option in self.own)]
        return "\n".join(lines) + "\n"

    def _line(self, option: Option) -> str:
        value = self.values[option.name]
        if value is None:
            return f"# {option.name}: not given, the engine's default"
        if isinstance(value, str):
            value = re.sub(r"(?<=://)([^/@]*:)?[^/@]*@", "***@", value)
        return f"{option.name} = {json.dumps(value)}  # {self.sources[option.name]}"


def resolve(
    given: Mapping[str, Any],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    own: Sequence[Option] = (),
    section: str = "",
) -> Settings:
    """Put flags, environment and file together, the first that has a value winning. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    table = _read(file, own, section)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in (*ENGINE, *own):
        prefix = f"KVBOOST_{section}_" if option in own else "KVBOOST_"
        variable = (prefix + option.name).upper()
        if given.get(option.name) is not None:
            value, source = given[option.name], "--" + option.name.replace("_", "-")
        elif environ.get(variable):
            value, source = _parsed(environ[variable], option, variable), variable
        elif option.name in table:
            value, source = _parsed(table[option.name], option, f"{option.name} in {file}"), str(file)
        else:
            value, source = option.default, "default"
        values[option.name], sources[option.name] = _meant(option, value), source
    return Settings(values, sources, own, section)


def _read(file: Path | None, own: Sequence[Option], section: str) -> dict[str, Any]:
    """The settings in a TOML file: the engine's, and those of the command's own table."""
    if file is None:
        return {}
    try:
        content = tomllib.loads(file.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as TOML ({error}); give another file with --config") from error
    table = {name: value for name, value in content.items() if not isinstance(value, dict)}
    mine = content.get(section, {}) if section else {}
    for names, known in ((table, ENGINE), (mine, own)):
        for name in names:
            if name not in {option.name for option in known}:
                near = difflib.get_close_matches(name, [option.name for option in known], n=1)
                hint = f"did you mean {near[0]}?" if near else "run with --show-config to see all"
                raise ConfigError(f"{name} in {file} is not a setting; {hint}")
    return {**table, **mine}


def _parsed(value: Any, option: Option, where: str) -> Any:
    """A value of the file or the environment as what the setting wants."""
    if option.kind is bool:
        spoken = str(value).lower()
        if spoken not in ("true", "false", "1", "0", "yes", "no"):
            raise ConfigError(f"{where} is {value!r}; give true or false")
        return spoken in ("true", "1", "yes")
    try:
        if isinstance(value, list | bool):
            raise ValueError("of another kind")
        return option.kind(value)
    except ValueError as error:
        raise ConfigError(f"{where} is {value!r}; give {_KIND_NAMES[option.kind]}") from error


_KIND_NAMES = {int: "a whole number", float: "a number", str: "text"}


def _meant(option: Option, value: Any) -> Any:
    """A share is a number, a path may begin at home."""
    if option.name == "quality" and value is not None:
        try:
            return float(value)
        except ValueError:
            return value
    if option.name in ("cache_dir", "calibration", "record_key_file", "kv_dir") and value is not None:
        return str(Path(value).expanduser())
    return value


def with_settings(*own: Option, section: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the engine's flags, its ``own``, ``--config`` and ``--show-config``.

    The command has a parameter ``settings`` and gets a :class:`Settings` there.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        options = [option for option in (*own, *ENGINE) if option.help]
        parameters = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "settings"
        ]
        parameters += [_flag(option, panel=None if option in own else _PANEL) for option in options]
        parameters += [_keyword("config", _CONFIG, None), _keyword("show_config", _SHOW, False)]

        @functools.wraps(command)
        def wrapped(**arguments: Any) -> Any:
            given = {option.name: arguments.pop(option.name) for option in options}
            settings = resolve(given, file=arguments.pop("config"), own=own, section=section)
            if arguments.pop("show_config"):
                typer.echo(settings.show_config(), nl=False)
                raise typer.Exit(0)
            return command(**arguments, settings=settings)

        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return wrapped

    return decorate


_CONFIG = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", envvar="KVBOOST_CONFIG", help="A TOML file of settings."),
]
_SHOW = Annotated[bool, typer.Option("--show-config", help="Print what is set and by whom, and do nothing else.")]


def _flag(option: Option, *, panel: str | None) -> inspect.Parameter:
    flag = "--" + option.name.replace("_", "-")
    kind: Any = option.kind
    info = typer.Option(flag, help=option.help, rich_help_panel=panel, show_default=False)
    return _keyword(option.name, Annotated[kind | None, info], None)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
