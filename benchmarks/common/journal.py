"""The file of samples: one JSON object a line, appended as they come, so that a run of hours can be continued.

Used by the bench, the yardstick and proofs in parts. Invariants: the first line has the settings and the machine, and a
run with others is refused; a sample is in the file before the next one is measured; a line that an interrupted run left
unfinished is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.common.report import BenchError
from kvboost.bench.report import Machine, say

_OTHER_FILE = "continue it as it was begun, or give another --out"
_MACHINE = ("cpu", "threads", "torch", "transformers")  # whose times are no comparison with others


@dataclass(frozen=True)
class Kind:
    """What a file is of: a name and a version for its first line, and the fields that tell samples apart."""

    name: str
    version: int
    key: tuple[str, ...]


class Journal:
    """Samples by their keys. Without a file they are kept in memory only."""

    def __init__(self, file: Path | None, kind: Kind, settings: Mapping[str, Any], machine: Machine) -> None:
        header: dict[str, Any] = {kind.name: kind.version, "settings": dict(settings), "machine": asdict(machine)}
        self.header = header
        self.samples: list[dict[str, Any]] = []
        self._kind = kind
        self._keys: set[tuple[Any, ...]] = set()
        self._stream: IO[str] | None = None
        if file is None:
            return
        if file.exists() and file.stat().st_size:
            self.header, self.samples, end = _read(file, kind)
            self._keys = {self._key(sample) for sample in self.samples}
            check_same(f"{file.name} was begun with", self.header["settings"], header["settings"])
            machines = [{name: one["machine"].get(name) for name in _MACHINE} for one in (self.header, header)]
            check_same(f"{file.name} was begun on another machine, with", *machines)
            with file.open("r+b") as whole:
                whole.truncate(end)
            say(f"{file.name} has {len(self.samples)} samples; they are not measured again")
        try:
            self._stream = file.open("a", encoding="utf-8")
        except OSError as error:
            raise BenchError(f"cannot write {file.name}: {error.strerror}; give another --out") from error
        if self._stream.tell() == 0:
            self._write(header)

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        """Whether the sample with this key is there."""
        return key in self._keys

    def add(self, sample: dict[str, Any]) -> None:
        """Keep a sample."""
        self.samples.append(sample)
        self._keys.add(self._key(sample))
        self._write(sample)

    def _key(self, sample: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(sample[name] for name in self._kind.key)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def load(file: Path, kind: Kind) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the samples of a file."""
    header, samples, _ = _read(file, kind)
    return header, samples


def _read(file: Path, kind: Kind) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """The header, the samples, and where the last whole line ends."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BenchError(f"cannot read {file}: {error.strerror}; give files that `--out` wrote") from error
    end = data.rfind(b"\n") + 1
    records = []
    for number, line in enumerate(data[:end].splitlines(), 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise BenchError(f"line {number} of {file.name} is not JSON; take it out, or give another file") from error
    if not records or not isinstance(records[0], dict) or records[0].get(kind.name) != kind.version:
        raise BenchError(f"{file.name} does not begin as a file of this version of {kind.name}; give another file")
    return records[0], records[1:], end


def check_same(begun: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with samples that were taken otherwise; ``begun`` begins the message."""
    other = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if other:
        differences = ", ".join(f"{name} {before.get(name)!r} instead of {now.get(name)!r}" for name in other)
        raise BenchError(f"{begun} {differences}; {_OTHER_FILE}")
