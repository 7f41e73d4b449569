"""Reads the settings' values: one pydantic-settings model over flags, environment and a TOML file.

Called by :mod:`kvboost.cli.settings` once a command runs; needs ``kvboost[cli]``. The model is made from the settings'
dataclasses, so it declares nothing of its own. Invariant: every error is a ConfigError that says who gave the value.
"""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from kvboost.cli.settings import SECTIONS, SETTINGS, Setting, Settings, is_list, without_password
from kvboost.errors import ConfigError

_PREFIX = "KVBOOST_"
_NEAR = 0.85  # how alike a variable is to one of ours before it is a slip of the pen
_Path = Annotated[Path, AfterValidator(Path.expanduser)]


class _Sources(BaseSettings):
    """Flags, then the environment, then the file of ``toml_file``."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_nested_delimiter="_",
        env_nested_max_split=1,  # KVBOOST_SERVE_MAX_RUNNING is max_running of serve
        env_ignore_empty=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


@functools.cache
def _model() -> type[_Sources]:
    fields: dict[str, Any] = _model_fields("")
    for section in filter(None, SECTIONS):
        table = create_model(section, __config__=ConfigDict(extra="forbid"), **_model_fields(section))
        fields[section] = (table, Field(default_factory=table))
    return create_model("KVBoostSettings", __base__=_Sources, **fields)


def _model_fields(section: str) -> dict[str, Any]:
    return {setting.name: _model_field(setting) for setting in SETTINGS if setting.section == section}


def _model_field(setting: Setting) -> tuple[Any, Any]:
    if setting.hint is Any:  # Python takes objects there, other sources only their names
        return str | None, Field(default=setting.default)
    if is_list(setting):
        return Annotated[setting.hint, NoDecode, BeforeValidator(_words)], Field(default=setting.default)
    if Path in get_args(setting.hint):
        return _Path | None, Field(default=setting.default)
    if len(set(get_args(setting.hint)) - {type(None)}) > 1:  # a number where the text is one
        return setting.hint, Field(default=setting.default, union_mode="left_to_right")
    return setting.hint, Field(default=setting.default)


def _words(value: Any) -> Any:
    """A list as the environment writes it: words between spaces or commas."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


def read_settings(flags: Mapping[Setting, Any], *, file: Path | None = None) -> Settings:
    """The values of all settings, and who gave them. Raises ConfigError."""
    _check_variables()
    model = type("KVBoostSettings", (_model(),), {"model_config": {"toml_file": _checked(file)}})
    given: dict[str, Any] = {}
    for setting, value in flags.items():
        (given.setdefault(setting.section, {}) if setting.section else given)[setting.name] = value
    environment: Mapping[str, Any] = {}
    try:
        environment, table = EnvSettingsSource(model)(), TomlConfigSettingsSource(model)()
        values = model(**given).model_dump()
    except ValidationError as error:
        raise _config_error(error.errors()[0], flags, environment, file) from error
    except SettingsError as error:
        raise ConfigError(f"{error}; see kvboost COMMAND --show-config for the names") from error
    sources: dict[Setting, str] = {}
    for setting in SETTINGS:
        for names, name in ((given, setting.flag), (environment, setting.variable), (table, str(file))):
            if setting.name in _table(names, setting.section):
                sources.setdefault(setting, name)
    return Settings({setting: _table(values, setting.section)[setting.name] for setting in SETTINGS}, sources)


def _table(values: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    return values.get(section, {}) if section else values


def _checked(file: Path | None) -> Path | None:
    """The file, if it can be read: pydantic-settings passes over one that is not there."""
    if file is None:
        return None
    try:
        tomllib.loads(file.expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {file}; give a TOML file with --config") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); give another file with --config") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as TOML ({error}); give another file with --config") from error
    return file.expanduser()


def _check_variables() -> None:
    """Refuse a variable that is nearly one of ours. Other programs may use the same prefix."""
    known = {setting.variable for setting in SETTINGS} | {"KVBOOST_CONFIG", "KVBOOST_LOG_LEVEL"}
    for name in os.environ:
        near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR) if name.startswith(_PREFIX) else []
        if near and name not in known:
            raise ConfigError(f"the environment variable {name} is not a setting; did you mean {near[0]}?")


def _config_error(
    found: ErrorDetails, flags: Mapping[Setting, Any], environment: Mapping[str, Any], file: Path | None
) -> ConfigError:
    """What is wrong, by the name under which it was given."""
    path = [str(part) for part in found["loc"]]
    section, name = path[:2] if path[0] in SECTIONS and len(path) > 1 else ("", path[0])
    known = {setting.name: setting for setting in SETTINGS if setting.section == section}
    in_environment = name in _table(environment, section)
    where = "_".join(filter(None, ("KVBOOST", section, name))).upper() if in_environment else f"{name} in {file}"
    if found["type"] == "extra_forbidden":
        if namesakes := [setting for setting in SETTINGS if setting.name == name]:
            return ConfigError(f"{where} is not in its place; {_where_to_give(namesakes, in_environment)}")
        near = difflib.get_close_matches(name, [*known, *([] if section else SECTIONS)], n=1)
        hint = f"did you mean {near[0]}?" if near else "run with --show-config to see all"
        return ConfigError(f"{where} is not a setting; {hint}")
    if known.get(name) in flags:
        where = known[name].flag
    wanted = found["msg"].replace("Input should be", "give", 1).partition(",")[0]
    return ConfigError(f"{where} is {without_password(found['input'])!r}; {wanted}")


def _where_to_give(settings: list[Setting], in_environment: bool) -> str:
    if in_environment:
        return "did you mean " + " or ".join(setting.variable for setting in settings) + "?"
    tables = [f"under [{setting.section}]" if setting.section else "before all tables" for setting in settings]
    return "write it " + " or ".join(tables)
