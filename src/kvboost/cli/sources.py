"""Reads the settings' values: one pydantic-settings model over flags, environment and a TOML file.

Called by :mod:`kvboost.cli.settings` once a command runs; needs ``kvboost[cli]``. The model is made from the settings'
dataclasses, so it declares nothing of its own. Invariant: every error is a ConfigError that says who gave the value.
"""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from kvboost.cli.settings import SECTIONS, SETTINGS, Setting, Settings, without_password
from kvboost.errors import ConfigError

_PREFIX = "KVBOOST_"
_NEAR = 0.85  # how alike a variable is to one of ours before it is taken for a slip of the pen
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
    if Path in get_args(setting.hint):
        return _Path | None, Field(default=setting.default)
    if len(set(get_args(setting.hint)) - {type(None)}) > 1:  # a number where the text is one
        return setting.hint, Field(default=setting.default, union_mode="left_to_right")
    return setting.hint, Field(default=setting.default)


def read_settings(flags: Mapping[Setting, Any], *, file: Path | None = None) -> Settings:
    """The values of all settings, and who gave them. Raises ConfigError."""
    _check_variables()
    model = type("KVBoostSettings", (_model(),), {"model_config": {"toml_file": _checked(file)}})
    given = _nested(flags)
    try:
        environment, table = EnvSettingsSource(model)(), TomlConfigSettingsSource(model)()
        values = model(**given)
    except ValidationError as error:
        raise _told(error, given=given, environment=environment, file=file) from error
    except SettingsError as error:
        raise ConfigError(f"{error}; see kvboost COMMAND --show-config for the names") from error
    sources: dict[Setting, str] = {}
    for setting in SETTINGS:
        places = ((given, setting.flag), (environment, setting.variable), (table, str(file)))
        if name := next((name for place, name in places if setting.name in _table(place, setting.section)), None):
            sources[setting] = name
    return Settings({setting: _value(values, setting) for setting in SETTINGS}, sources)


def _nested(flags: Mapping[Setting, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for setting, value in flags.items():
        (nested.setdefault(setting.section, {}) if setting.section else nested)[setting.name] = value
    return nested


def _table(place: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    return place.get(section, {}) if section else place


def _value(values: BaseModel, setting: Setting) -> Any:
    return getattr(getattr(values, setting.section) if setting.section else values, setting.name)


def _checked(file: Path | None) -> Path | None:
    """The file, if it can be read: pydantic-settings passes over one that is not there."""
    if file is None:
        return None
    try:
        tomllib.loads(file.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as TOML ({error}); give another file with --config") from error
    return file.expanduser()


def _check_variables() -> None:
    """Refuse a variable that is nearly one of ours. Others may have names of their own behind the same prefix."""
    known = {setting.variable for setting in SETTINGS} | {"KVBOOST_CONFIG"}
    for name in os.environ:
        near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR) if name.startswith(_PREFIX) else []
        if near and name not in known:
            raise ConfigError(f"the environment variable {name} is not a setting; did you mean {near[0]}?")


def _told(
    error: ValidationError, *, given: Mapping[str, Any], environment: Mapping[str, Any], file: Path | None
) -> ConfigError:
    """The first thing that is wrong, by the name that its giver knows."""
    found = error.errors()[0]
    *tables, name = [str(part) for part in found["loc"][: 2 if found["loc"][0] in SECTIONS else 1]]
    section = tables[0] if tables else ""
    from_environment = name in _table(environment, section)
    variable = "_".join(part.upper() for part in ("KVBOOST", section, name) if part)
    where = variable if from_environment else f"{name} in {file}"
    if found["type"] == "extra_forbidden":
        return ConfigError(f"{where} is not a setting; {_hint(name, section)}")
    if name in _table(given, section):
        where = "--" + name.replace("_", "-")
    return ConfigError(f"{where} is {without_password(found['input'])!r}; {_wanted(found['msg'])}")


def _hint(name: str, section: str) -> str:
    known: Collection[str] = [setting.name for setting in SETTINGS if setting.section == section]
    near = difflib.get_close_matches(name, [*known, *(SECTIONS if not section else ())], n=1)
    return f"did you mean {near[0]}?" if near else "run with --show-config to see all"


def _wanted(message: str) -> str:
    """``Input should be a valid integer, ...`` as a request."""
    return message.replace("Input should be", "give", 1).partition(",")[0]
