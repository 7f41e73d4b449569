"""Answers that follow a JSON schema: which tokens may come next.

Used by ``map`` and by the server, whose clients' schemas it checks first. Needs llguidance (``kvboost[structured]``).
Invariant: what may come next depends on the tokens so far only, so a matcher serves any order of calls.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch

from kvboost.errors import ConfigError, with_extra

LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 50_000,  # work of one mask, a quarter of llguidance's own limit
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,  # of 1 to 2 kB each, in every answer
}
# Without this a model may write blanks for ever, which a schema allows between any two words.
WRITTEN: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SCHEMAS = 64  # compiled ones that are kept


def is_installed() -> bool:
    """Whether schemas can be followed at all."""
    return importlib.util.find_spec("llguidance") is not None


class Matchers:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.end_token_ids = sorted(end_token_ids)
        self._lock = threading.Lock()
        self._made: Any = None
        self._of_schema = lru_cache(maxsize=_SCHEMAS)(self._compiled)

    def prepare(self) -> Any:
        """The table of tokens. It takes seconds of the interpreter for 150,000 of them."""
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._made is None:
                ends = self.end_token_ids or None
                self._made = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=ends)
            return self._made

    def compile(self, grammar: str) -> Any:
        """The matcher of a grammar, or the reason why there is none."""
        from llguidance import LLMatcher, LLParserLimits

        first = LLMatcher(self.prepare(), grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        return first.get_error().splitlines()[0] if first.is_error() else first

    def allowed_after(self, prompt_tokens: int, schema: Any) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """What holds the answer to a prompt of this length to ``schema``, as ``prefix_allowed_tokens_fn``.

        The schema is a dict or a pydantic class. Raises ConfigError for one that cannot be followed.
        """
        if self._tokenizer is None:
            raise ConfigError("schema needs a tokenizer; make the engine with one")
        if not is_installed():
            raise ConfigError(f"schema needs llguidance; {with_extra('structured')}")
        schema = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
        if not isinstance(schema, dict):
            raise ConfigError(f"schema={schema!r} is none; give a JSON schema as a dict, or a pydantic class")
        following = Following(self._of_schema(json.dumps(schema)).deep_copy(), self.end_token_ids)

        def allowed(_: int, ids: torch.Tensor) -> torch.Tensor:
            mask = following.allowed(ids[prompt_tokens:].tolist(), self._vocab_size)
            return torch.arange(self._vocab_size) if mask is None else mask.nonzero()[:, 0]

        return allowed

    def _compiled(self, schema: str) -> Any:
        from llguidance import LLMatcher

        try:
            found = self.compile(LLMatcher.grammar_from_json_schema(schema, overrides=WRITTEN))
        except ValueError as error:
            found = str(error)
        if isinstance(found, str):
            raise ConfigError(f"this schema cannot be followed: {found}")
        return found


class Following:
    """One answer that follows a grammar."""

    def __init__(self, matcher: Any, end_token_ids: Sequence[int]) -> None:
        self._matcher, self._end_token_ids = matcher, list(end_token_ids)
        self._taken: list[int] = []

    def allowed(self, produced: list[int], vocab_size: int) -> torch.Tensor | None:
        """Whether each token can come after those ``produced``, [vocabulary]; None if each can."""
        if produced[: len(self._taken)] != self._taken:  # a job that was restarted, another beam, or a draft's tokens
            self._matcher.reset()
            self._taken = []
        for token in produced[len(self._taken) :]:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
        self._taken = list(produced)
        mask = b"" if self._matcher.is_stopped() else self._matcher.compute_bitmask()
        # Its limits, for example, which it may meet in this mask: what was written so far may be half of an answer.
        if self._matcher.is_error():
            why = self._matcher.get_error().splitlines()[0]
            raise ConfigError(f"the grammar cannot go on: {why}; simplify the schema, its patterns most of all")
        if not mask and not self._end_token_ids:
            return None  # a model that cannot end: what follows the answer is free
        allowed = torch.zeros(vocab_size, dtype=torch.bool)  # also for rows of the embedding that are no token
        if not mask:
            allowed[self._end_token_ids] = True
        else:
            bits = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
            flags = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[:vocab_size]
            allowed[: len(flags)] = flags.bool()
        return allowed
