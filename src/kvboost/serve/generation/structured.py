"""Answers that follow a JSON schema or call a tool: tokens that would break that are forbidden before one is drawn.

Made from ``response_format`` and ``tool_choice``, run by whoever draws tokens, through ``Job.constrain``. Needs
llguidance (``kvboost[structured]``). Invariant: a client's schema is compiled once per request, in a worker thread,
within the server's limits; one that cannot be compiled is refused before anything is computed.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvboost.errors import with_extra
from kvboost.serve.errors import ApiError, bad_request
from kvboost.serve.schemas.base import JsonObjectFormat, ResponseFormat, TextFormat
from kvboost.serve.schemas.responses import InlineSchemaFormat
from kvboost.serve.security.limits import Limits, check_json

if TYPE_CHECKING:
    import torch

_ANY_OBJECT = {"type": "object"}
# Without this a model may write blanks for ever, which a schema allows between any two words.
_WRITTEN: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Constrain = Callable[[list[int], "torch.Tensor"], None]


class Grammars:
    """Compiles formats for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_token_ids = tokenizer, vocab_size, end_token_ids
        self._lock = threading.Lock()
        self._made: Any = None

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
        first = self._matcher(schema)
        if isinstance(first, str):
            raise bad_request(f"this schema cannot be used: {first}", param=param, code="invalid_schema")
        return lambda: _GrammarConstraint(first.deep_copy(), self._end_token_ids)

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
            f'call{number}: {json.dumps(_call_opens(name))} %json {json.dumps({**schema, "x-guidance": _WRITTEN})} "}}"'
            for number, (name, schema) in enumerate(schemas.items())
        ]
        start = "start: " + " | ".join(f"call{number}" for number in range(len(rules)))
        grammar = LLMatcher.grammar_from_lark("\n".join([start, *rules]))
        first = LLMatcher(self._ll_tokenizer(), grammar, log_level=0)
        if first.is_error():
            for name, schema in schemas.items():
                alone = self._matcher(schema)
                if isinstance(alone, str):
                    raise _no_schema(name, alone)
            raise bad_request(
                f"these tools cannot be used: {first.get_error().splitlines()[0]}",
                param="tools",
                code="invalid_schema",
            )
        return lambda: _GrammarConstraint(first.deep_copy(), self._end_token_ids)

    def _matcher(self, schema: dict[str, Any]) -> Any:
        """The matcher of a schema, or the reason why there is none."""
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_WRITTEN)
        except ValueError as error:
            return str(error)
        first = LLMatcher(self._ll_tokenizer(), grammar, log_level=0)
        return first.get_error().splitlines()[0] if first.is_error() else first

    def _ll_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._made is None:
                end_tokens = sorted(self._end_token_ids) or None
                self._made = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=end_tokens)
            return self._made


def _check_installed(param: str) -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise ApiError(400, f"{param} needs llguidance on the server; {with_extra('structured')}", param=param)


def _no_schema(name: str, why: str) -> ApiError:
    return bad_request(f"the parameters of {name} cannot be used: {why}", param="tools", code="invalid_schema")


def _call_opens(name: str) -> str:
    return '{"name": ' + json.dumps(name) + ', "arguments": '


class _GrammarConstraint:
    """Constrains one answer to a grammar."""

    def __init__(self, matcher: Any, end_token_ids: frozenset[int]) -> None:
        self._matcher, self._end_token_ids = matcher, sorted(end_token_ids)
        self._taken = 0

    def __call__(self, produced: list[int], logits: torch.Tensor) -> None:
        """Forbid, in place, every token that cannot come next. ``logits`` [vocabulary]."""
        import torch

        if len(produced) < self._taken:  # the job was preempted and restarted
            self._matcher.reset()
            self._taken = 0
        for token in produced[self._taken :]:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
        self._taken = len(produced)
        if self._matcher.is_error():  # its limits, for example: what was written so far may be half of an answer
            raise RuntimeError(f"the grammar cannot go on: {self._matcher.get_error().splitlines()[0]}")
        if self._matcher.is_stopped():
            if not self._end_token_ids:
                return  # a model that cannot end: what follows the answer is free
            allowed = torch.zeros(logits.shape[0], dtype=torch.bool)
            allowed[self._end_token_ids] = True
        else:
            bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
            allowed = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[: logits.shape[0]].bool()
            if len(allowed) < logits.shape[0]:  # rows of the embedding that are no token
                allowed = torch.nn.functional.pad(allowed, (0, logits.shape[0] - len(allowed)))
        logits.masked_fill_(~allowed.to(logits.device), float("-inf"))
