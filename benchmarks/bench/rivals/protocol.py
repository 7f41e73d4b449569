"""One JSON line per order, one per answer: the loop that every contestant's process runs.

Orders: ``generate`` (tokens, text, boundaries, new, moves, compare), ``forget`` (reset_peak), ``status``, and ours
also ``verify`` and ``facts``.
Invariants: answers are the only thing on the standard output; a clock runs from the call to the moment a token's id is
in Python's hands; processor time is that of the whole process, all threads together.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

_MODULES = {
    "kvboost": "ours",
    "plain": "transformers_plain",
    "kept-cache": "transformers_plain",
    "batching": "transformers_batching",
    "vllm": "vllm_engine",
    "vllm-kvboost": "vllm_engine",
    "llama-cpp": "llama_cpp_engine",
    "kvboost-0.9": "predecessor",
}


@dataclass
class Answer:
    """Greedy tokens, and what the contestant says it did not compute."""

    tokens: list[int]
    cached: int | None = 0
    """Prompt tokens taken from a cache; None if it does not say."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the answer's line."""


class Clock:
    """Times of one request. A contestant calls :meth:`token` as soon as it has a new token's id."""

    def __init__(self) -> None:
        self.first: tuple[float, float] | None = None
        self.begin = (time.perf_counter(), time.process_time())

    def token(self) -> None:
        """A token is there; only the first counts."""
        if self.first is None:
            self.first = (time.perf_counter(), time.process_time())

    def times(self) -> dict[str, float]:
        """Milliseconds to the first token and to the end, by the clock and of the processor."""
        end = (time.perf_counter(), time.process_time())
        first = self.first or end
        names = ("ttft_ms", "cpu_ms"), ("total_ms", "total_cpu_ms")
        return {
            name: round(1000 * (moment[kind] - self.begin[kind]), 3)
            for moment, pair in zip((first, end), names)  # noqa: B905 - a rival's Python may be 3.9
            for kind, name in enumerate(pair)
        }


class FirstToken:
    """A streamer for ``generate`` that looks at the clock. The prompt is put before the first new token.

    `kvboost bench` has one too, which a rival's environment lacks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._puts = clock, 0

    def put(self, value: Any) -> None:
        """New ids."""
        value.tolist()  # a token is usable once it has left the accelerator
        self._puts += 1
        if self._puts == 2:
            self._clock.token()

    def end(self) -> None:
        """Nothing is left to do."""


def main(arguments: list[str]) -> None:
    """Load the contestant, then serve orders until the input ends."""
    name, settings = arguments[0], json.loads(arguments[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        engine: Any = importlib.import_module(f"{__package__}.{_MODULES[name]}").make(name, settings)
    except ModuleNotFoundError as error:
        say({"missing": error.name})
        return
    except Exception as error:  # noqa: BLE001 - told to the caller, who skips this contestant
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True, "versions": engine.versions, "dtype": engine.dtype, "threads": _threads(engine)})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            say(_serve(engine, order))
        except Exception as error:  # noqa: BLE001 - the request's answer; the process goes on
            say({"error": f"{type(error).__name__}: {error}"})
    close = getattr(engine, "close", None)
    if close is not None:
        close()


def _serve(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    if order["do"] == "generate":
        check = getattr(engine, "check", None)  # of those that could read other tokens than the others
        if check is not None:
            check(order)
        clock = Clock()
        answer = engine.generate(order, clock)
        if not answer.tokens:
            raise RuntimeError("it answered without a token, so there is no time to the first")
        told = answer.extra.pop("times", None) or clock.times()
        return {**told, "tokens": answer.tokens, "cached": answer.cached, **answer.extra}
    if order["do"] == "forget":
        engine.forget()
        return {"peak_reset": _reset_peak()} if order.get("reset_peak") else {}
    if order["do"] == "status":
        return {"rss_peak": _rss_peak()}
    answer = getattr(engine, order["do"])(order)
    return dict(answer)


def _reset_peak() -> bool:
    """Let the peak begin anew with the memory of now; False where the system does not."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _rss_peak() -> int:
    """The most memory this process has had since its peak was reset, in bytes."""
    try:
        with open("/proc/self/status") as status:
            found = [line for line in status if line.startswith("VmHWM:")]
    except OSError:
        found = []  # not Linux
    if found:
        return 1024 * int(found[0].split()[1])
    # On Linux this would begin with the parent's, of which a new process is a copy for a moment.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


def _threads(engine: Any) -> int | None:
    """What the engine says, or else torch's; None if neither does."""
    if getattr(engine, "threads", None) is not None:
        return int(engine.threads)
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else None
