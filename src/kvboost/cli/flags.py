"""Flags for the settings: what ``@with_settings()`` adds to a command, and where its values come from.

Used by every command that makes an engine. A value is that of a flag, else of the environment, else of a TOML file;
pydantic makes it what it is. Invariants: help texts wait for neither torch nor pydantic; every error is a ConfigError
that says who gave the value; a name that is nearly one of ours is refused, in the file every name that is none.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from kvboost.cli.output import LogLevel, set_level
from kvboost.cli.settings import SECTIONS, SETTINGS, Setting, Settings, is_list, without_password
from kvboost.errors import ConfigError

_PREFIX = "KVBOOST_"
_NEAR = 0.85  # how alike a variable is to one of ours before it is a slip of the pen
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name, as Transformers takes it.")]


def with_settings(*sections: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of ``sections`` and of the engine, ``--config``, ``--show-config`` and ``--log-level``.

    The command has a parameter ``settings`` and gets a :class:`Settings` there.
    """
    offered = [setting for section in (*sections, "") for setting in SETTINGS if setting.section == section]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "settings"]
        parameters += [_keyword(setting.name, _flag(setting), None) for setting in offered]
        parameters += [_keyword("config", _CONFIG, None), _keyword("show_config", _SHOW, False)]
        parameters += [_keyword("log_level", LogLevel, None)]

        @functools.wraps(command)
        def wrapped(**arguments: Any) -> Any:
            set_level(arguments.pop("log_level"))
            flags = {setting: arguments.pop(setting.name) for setting in offered}
            given = {setting: value for setting, value in flags.items() if value is not None}
            settings = read_settings(given, file=arguments.pop("config"))
            if arguments.pop("show_config"):
                typer.echo(settings.show_config("", *sections), nl=False)
                raise typer.Exit(0)
            return command(**arguments, settings=settings)

        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return wrapped

    return decorate


_CONFIG = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", envvar="KVBOOST_CONFIG", help="A TOML file of settings.")
]
_SHOW = Annotated[bool, typer.Option("--show-config", help="Print what is set and by whom, and do nothing else.")]


def _flag(setting: Setting) -> Any:
    """A flag for typer. Values stay text, so that they are checked in one place wherever they come from."""
    kinds = set(get_args(setting.hint)) or {setting.hint}
    options: dict[str, Any] = {"help": setting.help, "rich_help_panel": SECTIONS[setting.section][setting.config]}
    options["show_default"] = str(setting.default) if setting.default not in (None, "", False, ()) else False
    if bool in kinds:
        return Annotated[bool | None, typer.Option(f"{setting.flag}/--no-{setting.flag[2:]}", **options)]
    names = ((Path, "PATH"), (str, "SIZE" if int in kinds else "TEXT"), (float, "NUMBER"), (int, "INTEGER"))
    metavar = next((name for kind, name in names if kind in kinds), "TEXT")
    if is_list(setting):
        return Annotated[list[str] | None, typer.Option(setting.flag, metavar=metavar, **options)]
    return Annotated[str | None, typer.Option(setting.flag, metavar=metavar, **options)]


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def read_settings(flags: Mapping[Setting, Any], *, file: Path | None = None) -> Settings:
    """The values of all settings, and who gave them. Raises ConfigError."""
    table = _read_table(file)
    _check_variables()
    values, sources = {setting: setting.default for setting in SETTINGS}, dict[Setting, str]()
    for setting in SETTINGS:
        in_file = table.get(setting.section, {}) if setting.section else table
        for value, source, where in (
            (flags.get(setting), setting.flag, setting.flag),
            (os.environ.get(setting.variable) or None, setting.variable, setting.variable),
            (in_file.get(setting.name), str(file), f"{setting.name} in {file}"),
        ):
            if value is not None:
                values[setting], sources[setting] = _checked(setting, value, where), source
                break
    return Settings(values, sources)


def _checked(setting: Setting, value: Any, where: str) -> Any:
    """The value as what it is."""
    from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

    kind = setting.hint
    if kind is Any:  # Python takes objects there, other sources only their names
        kind = str
    elif is_list(setting):  # the environment writes words between spaces or commas
        value = value.replace(",", " ").split() if isinstance(value, str) else value
    elif Path in get_args(kind):
        kind = Annotated[Path, AfterValidator(Path.expanduser)]
    elif len(set(get_args(kind)) - {type(None)}) > 1:  # a number where the text is one
        kind = Annotated[kind, Field(union_mode="left_to_right")]
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        found = error.errors()[0]
        wanted = found["msg"].replace("Input should be", "give", 1).partition(",")[0]
        raise ConfigError(f"{where} is {without_password(found['input'])!r}; {wanted}") from error


def _read_table(file: Path | None) -> dict[str, Any]:
    """What the file says."""
    if file is None:
        return {}
    try:
        table = tomllib.loads(file.expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {file}; give a TOML file with --config") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); give another file with --config") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as TOML ({error}); give another file with --config") from error
    tables = {name: table.pop(name) for name in SECTIONS if name in table}
    for section, names in {"": table, **tables}.items():
        if not isinstance(names, Mapping):
            raise ConfigError(f"{section} in {file} is {names!r}; it is a table: write [{section}]")
        known = [setting.name for setting in SETTINGS if setting.section == section]
        for name in names.keys() - known:
            raise _unknown(f"{name} in {file}", name, [*known, *([] if section else SECTIONS)])
    return table | tables


def _check_variables() -> None:
    """Refuse a variable that is nearly one of ours, or in one of our tables. Others may use the same prefix."""
    known = {setting.variable for setting in SETTINGS} | {"KVBOOST_CONFIG", "KVBOOST_LOG_LEVEL"}
    for variable in os.environ.keys() - known:
        near = difflib.get_close_matches(variable, known, n=1, cutoff=_NEAR) if variable.startswith(_PREFIX) else []
        if near:
            raise ConfigError(f"the environment variable {variable} is not a setting; did you mean {near[0]}?")
        section, _, name = variable.removeprefix(_PREFIX).lower().partition("_")
        if variable.startswith(_PREFIX) and section in SECTIONS and os.environ[variable]:
            raise _unknown(variable, name, ())


def _unknown(where: str, name: str, known: Iterable[str]) -> ConfigError:
    """A name that is no setting there: one of another place, or a slip of the pen."""
    namesakes = [setting for setting in SETTINGS if setting.name == name]
    if namesakes and where.startswith(_PREFIX):
        return ConfigError(f"{where} is not in its place; did you mean {' or '.join(s.variable for s in namesakes)}?")
    if namesakes:
        places = (f"under [{setting.section}]" if setting.section else "before all tables" for setting in namesakes)
        return ConfigError(f"{where} is not in its place; write it {' or '.join(places)}")
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else "run with --show-config to see all"
    return ConfigError(f"{where} is not a setting; {hint}")
