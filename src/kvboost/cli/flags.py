"""Flags for the settings: what ``@with_settings()`` adds to a command.

Used by every command that makes an engine. Invariant: help texts wait for neither torch nor pydantic.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from kvboost.cli.output import LogLevel, set_level
from kvboost.cli.settings import PANELS, SETTINGS, Setting, is_list

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
            from kvboost.cli.sources import read_settings

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
    Path | None,
    typer.Option("--config", metavar="FILE", envvar="KVBOOST_CONFIG", help="A TOML file of settings."),
]
_SHOW = Annotated[bool, typer.Option("--show-config", help="Print what is set and by whom, and do nothing else.")]


def _flag(setting: Setting) -> Any:
    """A flag for typer. Values stay text, so that they are checked in one place wherever they come from."""
    kinds = set(get_args(setting.hint)) or {setting.hint}
    options: dict[str, Any] = {"help": setting.help, "rich_help_panel": PANELS[setting.config]}
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
