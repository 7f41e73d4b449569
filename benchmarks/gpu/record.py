"""The file of a GPU day: every finished section with what it was measured on, so that a second start goes on.

Written by :mod:`benchmarks.exact.gpu_day`, read by it and by the page. Invariants: the file is whole at any moment; a
section counts as done only for the setup and the settings it was run with; no path, host or user is in it.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import re
import traceback
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import BenchError
from benchmarks.gpu.day import FAILED
from benchmarks.internals import Shards, checkpoint_files
from kvboost import __version__
from kvboost.bench.report import cpu_model, say
from kvboost.errors import ConfigError

VERSION = 1
DONE, BEGUN, RAISED = "done", "begun", "ended by an error"
"""How far a section came. Only what is done is kept at a second start."""

_PATH = re.compile(r"(?<![\w.:/<>])(?:~|\.{1,2})?/[^\s'\",;:()\[\]{}<>]*/([^\s'\",;:()\[\]{}<>/]*)")
_TRACE_LINES = 12
_MESSAGE = 600


class DayFile:
    """Sections by name. Every change is on the disk before the method returns."""

    def __init__(self, file: Path, setup: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Raises BenchError for a file that is something else, or cannot be written."""
        self.file, self.setup, self.settings = file, dict(setup), dict(settings)
        self.sections: dict[str, dict[str, Any]] = {}
        if file.exists():
            self.sections = _read(file)
        self._write()

    def is_done(self, name: str) -> bool:
        """Whether this section ended, on the same setup and with the same settings."""
        section = self.sections.get(name)
        return section is not None and section["state"] == DONE and self._is_of_today(section)

    def was_tried(self, name: str) -> bool:
        """Whether it was begun and did not end well."""
        section = self.sections.get(name)
        return section is not None and section["state"] != DONE and self._is_of_today(section)

    def begin(self, name: str) -> None:
        """Say that a section runs: it may end the process."""
        self._put(name, {"state": BEGUN})

    def keep(self, name: str, found: Mapping[str, Any], *, state: str, seconds: float) -> None:
        """Keep what a section found."""
        self._put(name, {"state": state, "seconds": round(seconds, 1), **found})

    def otherwise(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """What was other than today when a section ran, as it was then."""
        today = {**self.setup, **self.settings}
        then = {**section["setup"], **section["settings"]}
        return {name: then.get(name) for name in {**today, **then} if then.get(name) != today.get(name)}

    def _is_of_today(self, section: Mapping[str, Any]) -> bool:
        return not self.otherwise(section)

    def _put(self, name: str, section: Mapping[str, Any]) -> None:
        self.sections[name] = without_places({**section, "setup": self.setup, "settings": self.settings})
        self._write()

    def _write(self) -> None:
        document = {"gpu_day": VERSION, "setup": self.setup, "settings": self.settings, "sections": self.sections}
        replace(self.file, json.dumps(document, indent=1) + "\n")


def replace(file: Path, text: str) -> None:
    """Write a file whole or not at all: a kill may come at any time. Raises BenchError if it cannot be written."""
    part = file.with_name(file.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except OSError as error:
        raise BenchError(f"cannot write {file}: {error.strerror}; give another folder with --results") from error


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["gpu_day"] != VERSION:
            raise KeyError("gpu_day")
        sections: dict[str, dict[str, Any]] = document["sections"]
        for section in sections.values():
            _ = section["state"], section["setup"], section["settings"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(
            f"{file} is no file of this version of gpu_day; move it away, or give another folder with --results"
        ) from error
    return sections


def describe_setup(folder: Path, *, device: torch.device, dtype: str) -> dict[str, Any]:
    """What the figures are of: the model, the device and the versions. No host and no user."""
    return {
        "model": model_name(folder),
        "model digest": model_digest(folder),
        "dtype": dtype,
        "device": device_name(device),
        "devices": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
        "driver": driver_of(device),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "kvboost": __version__,
    }


def model_name(folder: Path) -> str:
    """The folder's name; in the hub's cache, where it is a commit's, the model's."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def model_digest(folder: Path) -> str:
    """Of the config and of a few pages of every weight; of the config alone where there are no safetensors files."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    try:
        shards = Shards(checkpoint_files(str(folder), hub={}))
    except ConfigError as error:
        say(f"the digest is of the config alone: {error}")
        return f"config {digest.hexdigest()[:16]}"
    for name, tensor in sorted(shards.tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{tensor.shape}".encode())
    digest.update(shards.sample().encode())
    return digest.hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """As the driver names it."""
    if device.type == "cpu":
        return "CPU"
    module: Any = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    return f"{name} ({device.type})"


def driver_of(device: torch.device) -> str:
    """The version of CUDA or HIP that torch was built with."""
    if device.type != "cuda":
        return "none"
    return f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"


def explain(error: BaseException) -> str:
    """An exception and where it came from, in a few lines that name no folder."""
    frames = traceback.extract_tb(error.__traceback__)[-_TRACE_LINES:]
    where = [f"  {Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    text = str(error)
    text = text if len(text) <= _MESSAGE else text[:_MESSAGE] + " ..."  # torch lists every backend it knows
    return str(without_places("\n".join([f"{type(error).__name__}: {text}", *where])))


def without_places(value: Any) -> Any:
    """The same with every path cut to its last part, and without this host's and user's names."""
    if isinstance(value, Mapping):
        return {str(key): without_places(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(item) for item in value]
    if not isinstance(value, str):
        return value
    found = _PATH.sub(lambda match: match[1] or "(folder)", value)
    for name, stand_in in _NAMES.items():
        found = re.sub(rf"\b{re.escape(name)}\b", stand_in, found)
    return found


def _names() -> dict[str, str]:
    """What may not be told, and what stands for it. The names of containers' users are nobody's."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name
        user = ""
    found = {platform.node(): "(host)", user: "(user)"}
    return {name: stand_in for name, stand_in in found.items() if len(name) > 2 and name not in ("root", "localhost")}


_NAMES = _names()


def failures(section: Mapping[str, Any]) -> list[dict[str, str]]:
    """The checks of a section that failed."""
    return [check for check in section.get("checks", []) if check["status"] == FAILED]
