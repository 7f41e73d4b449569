"""Answers that follow a JSON schema or call a tool: tokens that would break that are forbidden before one is drawn.

Made from ``response_format`` and ``tool_choice``, run by whoever draws tokens, through ``Job.constrain``. Needs
llguidance (``kvboost[structured]``). Invariants: a client's schema is compiled once per request, in a worker thread,
within the server's limits; one that cannot be compiled, or not in time, is refused before anything is computed. What a
grammar costs on the model's thread is bounded.

Each grammar is compiled in a process of its own first: only so can a compiler be stopped that takes minutes or all
memory. One that passes took at most ``COMPILE_S`` and ``MEMORY_BYTES`` there, and takes about as much again here; one
is refused only for what it did itself; the process ends with this one.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any

from kvboost.engine.structured import LIMITS, WRITTEN, Following, Matchers, is_installed
from kvboost.errors import ConfigError, with_extra
from kvboost.failures import log_failure
from kvboost.serve.errors import ApiError, bad_request
from kvboost.serve.schemas.base import JsonObjectFormat, ResponseFormat, TextFormat
from kvboost.serve.schemas.responses import InlineSchemaFormat
from kvboost.serve.security.limits import Limits, check_json

if TYPE_CHECKING:
    import torch

COMPILE_S = 3.0  # usual schemas take milliseconds
MEMORY_BYTES = 2**30  # more than at the start; the worst schema that is known and ends in time takes a quarter of it
TOO_LONG = f"compiling it takes more than {COMPILE_S:g} s; simplify its patterns, or name fewer of them"
_TOO_LARGE = "compiling it takes too much memory; simplify its patterns, or name fewer of them"
_FAILED = "llguidance failed while compiling it; simplify its patterns"
_START_S = 60.0
_CHILD = """
import json, sys
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
limits, more = json.loads(sys.argv[1])
if sys.platform == "linux":  # others do not tell what is taken, or keep no limit
    import resource
    with open("/proc/self/statm") as sizes:
        most = int(sizes.read().split()[0]) * resource.getpagesize() + more
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # clients could fill a disk with them
limits, tokenizer = LLParserLimits(**limits), LLTokenizer("byte")
print(flush=True)
for line in sys.stdin:
    matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some find out only here that nothing can follow
    print(json.dumps(matcher.get_error().splitlines()[0] if matcher.is_error() else ""), flush=True)
"""


class GrammarCheck:
    """Says which grammars can be compiled within the limits. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def check(self, grammar: str, *, within: float = COMPILE_S) -> str:
        """Why it cannot be used; empty if it can."""
        with self._lock:
            why = self._ask(grammar, within)
            if why is None:  # the process was killed from outside, as a rule, which says nothing about the grammar
                why = self._ask(grammar, within)
            return _FAILED if why is None else why

    def _ask(self, grammar: str, within: float) -> str | None:
        """The same; no reason if the process ended without one."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(within, stop)
        timer.start()
        try:
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer.endswith("\n"):
            why: str = json.loads(answer)
            return why
        self._end()  # now: a process that is dying still looks alive to the next grammar
        if late.is_set():
            return TOO_LONG
        return _TOO_LARGE if process.returncode == -signal.SIGABRT else None  # what Rust does without memory

    def _running(self) -> subprocess.Popen[str]:
        """The process, started if there is none."""
        process = self._process
        if not self._closed and (process is None or process.poll() is not None):
            self._end()
            process = self._process = subprocess.Popen(
                # -P: nothing is imported from the directory that the server was started in.
                [sys.executable, "-P", "-c", _CHILD, json.dumps([LIMITS, MEMORY_BYTES])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdout is not None
            # Waited for: a start that is slow on a busy machine is not the grammar's time.
            timer = threading.Timer(_START_S, process.kill)
            timer.start()
            started = self._closed or process.stdout.readline()
            timer.cancel()
            if not started and not self._closed:
                self._end()
                raise RuntimeError(
                    f"{sys.executable} cannot run llguidance, which compiles schemas; see whether it starts"
                )
        if process is None or self._closed:  # looked at after the process is known: close() or this sees the other
            self._end()
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        """End the process, also while it compiles. Whatever is asked from now on is refused."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # whoever has the lock waits for this process
        with self._lock:
            self._end()


_log = logging.getLogger("kvboost.serve")
_ANY_OBJECT = {"type": "object"}
_MASK_S = 0.1  # of a processor, for the masks of an answer; llguidance's slowest of 10,000 usual schemas takes 0.02
_TOKEN_S = 0.002  # and for each new token; on average it takes 0.00005
Constrain = Callable[[list[int], "torch.Tensor"], None]


class Grammars:
    """Compiles formats for one tokenizer. Thread-safe."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers, self._check = matchers, GrammarCheck()

    def close(self) -> None:
        """End what runs beside."""
        self._check.close()

    def prepare(self) -> None:
        """Begin to make the table of tokens, in the background.

        It takes seconds of the interpreter for 150,000 tokens, which else all that runs during the first request
        with a schema would lose.
        """
        if is_installed():
            threading.Thread(target=self._prepare, name="kvboost-tokens", daemon=True).start()

    def _prepare(self) -> None:
        try:
            self._matchers.prepare()
        except Exception as error:  # noqa: BLE001 - a request that needs it raises it again
            log_failure(_log, error, "answers cannot follow schemas with this tokenizer")

    def compile(
        self, wanted: ResponseFormat | InlineSchemaFormat | None, *, limits: Limits, param: str
    ) -> Callable[[], Constrain] | None:
        """Makes constraints, one per answer, for the format; None for free text."""
        if wanted is None or isinstance(wanted, TextFormat):
            return None
        if isinstance(wanted, JsonObjectFormat):
            schema: dict[str, Any] = _ANY_OBJECT
        else:
            schema = wanted.schema_ if isinstance(wanted, InlineSchemaFormat) else wanted.json_schema.schema_
        check_json(schema, limits=limits, param=param)
        _check_installed(param)
        first = self._of_schema(schema, within=COMPILE_S)
        if isinstance(first, str):
            raise bad_request(f"this schema cannot be used: {first}", param=param, code="invalid_schema")
        return lambda: _GrammarConstraint(first.deep_copy(), self._matchers.end_token_ids)

    def compile_call(self, functions: Mapping[str, Mapping[str, Any] | None]) -> Callable[[], Constrain]:
        """Makes constraints, one per answer, for one call, ``{"name": ..., "arguments": {...}}``.

        ``functions`` are the names that may be called and the schemas of their arguments; None for no arguments.
        The caller has checked the schemas against its limits.
        """
        _check_installed("tool_choice")
        from llguidance import LLMatcher

        schemas: dict[str, dict[str, Any]] = {}
        for name, schema in functions.items():
            given = dict(schema) if schema is not None else {"properties": {}, "additionalProperties": False}
            if given.setdefault("type", "object") != "object":
                raise _no_schema(name, "arguments are an object")
            schemas[name] = given
        # Each schema is compiled by itself, so that "#/$defs" in it still means its own.
        rules = [
            f'call{number}: {json.dumps(_call_opens(name))} %json {json.dumps({**schema, "x-guidance": WRITTEN})} "}}"'
            for number, (name, schema) in enumerate(schemas.items())
        ]
        start = "start: " + " | ".join(f"call{number}" for number in range(len(rules)))
        first = self._matcher(LLMatcher.grammar_from_lark("\n".join([start, *rules])), within=COMPILE_S)
        if isinstance(first, str):
            ends = monotonic() + (COMPILE_S if first != TOO_LONG else 0.0)  # looking for the one takes no longer either
            for name, schema in schemas.items():
                if (left := ends - monotonic()) <= 0:
                    break
                alone = self._of_schema(schema, within=left)
                if isinstance(alone, str) and alone != TOO_LONG:
                    raise _no_schema(name, alone)
            raise bad_request(f"these tools cannot be used: {first}", param="tools", code="invalid_schema")
        return lambda: _GrammarConstraint(first.deep_copy(), self._matchers.end_token_ids)

    def _of_schema(self, schema: dict[str, Any], *, within: float) -> Any:
        """The matcher of a schema, or the reason why there is none."""
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=WRITTEN)
        except ValueError as error:
            return str(error)
        return self._matcher(grammar, within=within)

    def _matcher(self, grammar: str, *, within: float) -> Any:
        """The matcher of a grammar, or the reason why there is none."""
        return self._check.check(grammar, within=within) or self._matchers.compile(grammar)


def _check_installed(param: str) -> None:
    if not is_installed():
        raise ApiError(400, f"{param} needs llguidance on the server; {with_extra('structured')}", param=param)


def _no_schema(name: str, why: str) -> ApiError:
    return bad_request(f"the parameters of {name} cannot be used: {why}", param="tools", code="invalid_schema")


def _call_opens(name: str) -> str:
    return '{"name": ' + json.dumps(name) + ', "arguments": '


class _GrammarConstraint:
    """Constrains one answer to a grammar."""

    def __init__(self, matcher: Any, end_token_ids: Sequence[int]) -> None:
        self._following = Following(matcher, end_token_ids)
        self._spent = 0.0

    def __call__(self, produced: list[int], logits: torch.Tensor) -> None:
        """Forbid, in place, every token that cannot come next. ``logits`` [vocabulary]."""
        began = thread_time()
        allowed = self._following.allowed(produced, logits.shape[0])
        self._spent += thread_time() - began
        if self._spent > _MASK_S + _TOKEN_S * len(produced):
            raise ConfigError("the schema takes too long to follow; simplify the schema, its patterns most of all")
        if allowed is not None:
            logits.masked_fill_(~allowed.to(logits.device), float("-inf"))
