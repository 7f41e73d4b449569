"""The settings a user can give: as a flag, as ``KVBOOST_...`` in the environment, or in a TOML file.

Every setting is a field of a dataclass: its name, type, default and help text are declared there and nowhere else.
:mod:`kvboost.cli.flags` makes flags of them and reads their values. A TOML file has the engine's settings by their
names, and the others in tables::

    disk_cache_dir = "~/.cache/kvboost/kv"
    kv_cache_bits = 8

    [serve]
    port = 8080

Invariants: a password is never shown; importing this imports neither torch nor pydantic.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from kvboost.config import EngineConfig, LoadConfig, RunnerConfig
from kvboost.integrations.ray.config import RayConfig
from kvboost.serve.config import ServerConfig
from kvboost.serve.security.limits import Limits

_Config = TypeVar("_Config")


SECTIONS: Mapping[str, Mapping[type, str]] = {
    "": {EngineConfig: "Engine settings", LoadConfig: "Model settings"},
    "serve": {
        ServerConfig: "Server",
        RunnerConfig: "Requests side by side",
        Limits: "Limits per client and request",
    },
    "ray": {RayConfig: "A fleet (with --ray)"},
}
"""The dataclasses of each table of a TOML file, and their titles in help texts. Those of ``""`` precede all tables."""


@dataclass(frozen=True)
class Setting:
    """One field of one of the dataclasses."""

    section: str
    config: type
    name: str
    hint: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """On the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """In the environment."""
        return "_".join(part.upper() for part in ("KVBOOST", self.section, self.name) if part)


def _fields() -> Iterator[Setting]:
    for section, configs in SECTIONS.items():
        for config in configs:
            hints, docs = get_type_hints(config), _docstrings(config)
            for field in dataclasses.fields(config):
                text = re.split(r"(?<=\.)\s", docs[field.name], maxsplit=1)[0]
                help = " ".join(text.replace("`", "").split())
                yield Setting(section, config, field.name, hints[field.name], field.default, help)


def _docstrings(config: type) -> dict[str, str]:
    """The strings below a class's fields, which Python itself does not keep."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


SETTINGS = tuple(_fields())


def is_list(setting: Setting) -> bool:
    """Whether it takes several values: a flag that may be repeated, words in the environment, a list in a file."""
    return get_origin(setting.hint) is tuple


@dataclass(frozen=True)
class Settings:
    """The values of all settings, and where those came from that were given."""

    values: Mapping[Setting, Any]
    sources: Mapping[Setting, str]
    """A flag, an environment variable or a file. Settings that nobody gave are not in it."""

    def of(self, config: type[_Config]) -> _Config:
        """One of the dataclasses, filled in."""
        return config(**{setting.name: value for setting, value in self.values.items() if setting.config is config})

    def given(self, *configs: type) -> dict[str, Any]:
        """Of these dataclasses, only the fields that somebody gave."""
        return {setting.name: self.values[setting] for setting in self.sources if setting.config in configs}

    def engine(self) -> dict[str, Any]:
        """Keyword arguments for ``KVBoost.from_pretrained``: only what was given."""
        return self.given(EngineConfig, LoadConfig)

    def show_config(self, *sections: str) -> str:
        """The settings of ``sections`` as a TOML file with the source of each; passwords are hidden."""
        lines: list[str] = []
        for section in sections:
            lines += ["", f"[{section}]"] if section else []
            lines += [self._line(setting) for setting in SETTINGS if setting.section == section]
        return "\n".join(lines) + "\n"

    def _line(self, setting: Setting) -> str:
        value = self.values[setting]
        if value is None:
            return f"# {setting.name} is not set"
        written = without_password(value) if isinstance(value, str | Path) else value
        return f"{setting.name} = {json.dumps(written)}  # {self.sources.get(setting, 'default')}"


def without_password(value: Any) -> str:
    """The text of a value; what a URL has before its host is hidden."""
    return re.sub(r"(?<=://)([^/@]*:)?[^/@]*@", "***@", str(value))
