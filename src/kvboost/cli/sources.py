"""Reads the settings' values: from flags, else the environment, else a TOML file; pydantic makes them what they are.

Called by :mod:`kvboost.cli.flags` once a command runs. Invariants: every error is a ConfigError
that says who gave the value; a name that is nearly one of ours is refused, in the file every name that is none.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from kvboost.cli.settings import SECTIONS, SETTINGS, Setting, Settings, is_list, without_password
from kvboost.errors import ConfigError

_PREFIX = "KVBOOST_"
_NEAR = 0.85  # how alike a variable is to one of ours before it is a slip of the pen
_Path = Annotated[Path, AfterValidator(Path.expanduser)]


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
    kind = setting.hint
    if kind is Any:  # Python takes objects there, other sources only their names
        kind = str
    elif is_list(setting):  # the environment writes words between spaces or commas
        value = value.replace(",", " ").split() if isinstance(value, str) else value
    elif Path in get_args(kind):
        kind = _Path
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
        return ConfigError(f"{where} is not in its place; did you mean {_either(s.variable for s in namesakes)}?")
    if namesakes:
        places = (f"under [{setting.section}]" if setting.section else "before all tables" for setting in namesakes)
        return ConfigError(f"{where} is not in its place; write it {_either(places)}")
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else "run with --show-config to see all"
    return ConfigError(f"{where} is not a setting; {hint}")


def _either(words: Iterable[str]) -> str:
    return " or ".join(words)
