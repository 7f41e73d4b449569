"""Reads a log of prompts, and replays them against the engine's chunks and keys, with a store that keeps everything.

A log is JSON Lines with ``{"prompt": text}``, ``{"token_ids": [...]}`` or ``{"messages": [...]}``; ``bench mine`` and
``calibrate`` read theirs so too. Invariants: an error in a log names the file and the line; a prompt finds earlier
prompts only, never itself.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost.core.chunking import NaturalChunker
from kvboost.core.keys import chunk_keys, common_prefix, tail_keys
from kvboost.errors import ConfigError
from kvboost.extend import TokenArray
from kvboost.types import Chunk


@dataclass(frozen=True)
class LogRecord:
    """One request of the log: a text or its token ids, or the messages of a chat."""

    line: int
    prompt: str | list[int] | None = None
    boundaries: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    """What the template is given besides the messages."""


def read_log(file: Path, *, or_texts: bool = False) -> list[LogRecord]:
    """The requests in ``file``, in its order. Blank lines are skipped, and so are fields with other names.

    ``or_texts``: a file that does not begin with an object has one text per line.
    """
    try:
        # Not splitlines(): it also splits at characters that JSON leaves as they are inside a string.
        lines = file.expanduser().read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); give a file of JSON Lines") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 ({error.reason}); give a file of JSON Lines") from error
    given = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if or_texts and given and not given[0][1].lstrip().startswith("{"):
        return [LogRecord(number, prompt=line) for number, line in given]
    records = [_record(line, file, number) for number, line in given]
    if not records:
        raise ConfigError(f'{file} is empty; give a log with one {{"prompt": text}} or {{"messages": [...]}} per line')
    return records


def _record(line: str, file: Path, number: int) -> LogRecord:
    where = f"{file}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error}); repair that line") from error
    record = record if isinstance(record, dict) else {}
    prompt = record.get("prompt", record.get("token_ids"))
    if isinstance(prompt, str) or _are_ids(prompt):
        if not _are_ids(boundaries := record.get("boundaries", [])):
            raise ConfigError(f'{where}: "boundaries" is no list of positions; repair it, or leave it out')
        return LogRecord(number, prompt=prompt, boundaries=boundaries)
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f'{where} has neither "prompt" with a text nor "messages" with a list; write {{"prompt": "..."}} or '
            '{"messages": [{"role": "user", "content": "..."}]}'
        )
    if not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise ConfigError(f'{where}: every message needs a "role"; write {{"role": "user", "content": "..."}}')
    tools = record.get("tools")
    return LogRecord(
        number, messages=[_flat(message) for message in messages], tools=tools if isinstance(tools, list) else None
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, int) for entry in value)


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content in parts becomes one text, as the server makes it; what is no text is left out."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return {**message, "content": "\n".join(texts)}


_ROOT = hashlib.sha256(b"kvboost.explain").digest()
_KEPT = 4
"""Earlier prompts that are remembered for a chunk: the latest ones."""
_COMPARED = 2
"""Earlier prompts that a prompt is compared with, of those with the same beginning and of those with the same text."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class LoggedPrompt:
    """A prompt of the log, encoded."""

    line: int
    """Where it stands in the log."""
    tokens: TokenArray
    boundaries: Sequence[int] = ()
    messages: tuple[bytes, ...] = ()
    """A digest of each message of a chat; none for a text."""


@dataclass(frozen=True, eq=False)
class Replayed:
    """What of a prompt an engine would have had."""

    prompt: LoggedPrompt
    exact: int
    """Leading tokens that are reused exactly."""
    known: Mask
    """Of each token whether its chunk was seen at another position; False within the exact tokens."""
    origins: dict[int, tuple[int, int]]
    """Of the start of each such chunk: the prompt's index and the position where it was seen last."""
    near: list[int]
    """Indexes of the earlier prompts that have most in common with it."""
    common: int
    """Where the longest beginning that an earlier prompt shares ends."""


@dataclass
class Replay:
    """The prompts so far, and their chunks."""

    chunker: NaturalChunker
    prompts: list[LoggedPrompt] = field(default_factory=list)
    _prefixes: dict[bytes, deque[int]] = field(default_factory=dict, repr=False)
    _contents: dict[bytes, deque[tuple[int, int]]] = field(default_factory=dict, repr=False)

    def add(self, prompt: LoggedPrompt) -> Replayed:
        """Look a prompt up, then store it."""
        tokens = prompt.tokens
        ends = self.chunker.cut(tokens, prompt.boundaries)
        chunks = chunk_keys(_ROOT, tokens, ends if ends and ends[-1] == len(tokens) else [*ends, len(tokens)])
        leading = [chunk for chunk in self._leading(chunks) if chunk.end < len(tokens)]
        exact = self._with_tail(tokens, leading[-1] if leading else None)
        known = np.zeros(len(tokens), dtype=np.bool_)
        origins: dict[int, tuple[int, int]] = {}
        votes: Counter[int] = Counter()
        for chunk in chunks[len(leading) :]:
            seen = self._contents.get(chunk.content_key)
            if seen and chunk.end < len(tokens):
                known[max(chunk.start, exact) : chunk.end] = True
                origins[chunk.start] = seen[-1]
                votes.update({index: chunk.end - chunk.start for index, _ in seen})
        near = list(self._prefixes[leading[-1].prefix_key])[-_COMPARED:] if leading else []
        near += [index for index, _ in votes.most_common(_COMPARED)]
        near += range(max(0, len(self.prompts) - 1), len(self.prompts))
        near = list(dict.fromkeys(near))
        common = max((common_prefix(tokens, self.prompts[index].tokens) for index in near), default=0)
        for chunk in chunks:
            origin = len(self.prompts), chunk.start
            self._prefixes.setdefault(chunk.prefix_key, deque(maxlen=_KEPT)).append(origin[0])
            self._contents.setdefault(chunk.content_key, deque(maxlen=_KEPT)).append(origin)
        self.prompts.append(prompt)
        return Replayed(prompt, exact, known, origins, near, common)

    def _leading(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        missing = (number for number, chunk in enumerate(chunks) if chunk.prefix_key not in self._prefixes)
        return list(chunks[: next(missing, len(chunks))])

    def _with_tail(self, tokens: TokenArray, behind: Chunk | None) -> int:
        """Where exact reuse ends: the end of an earlier prompt is stored too, though no chunk ends there."""
        start = behind.end if behind is not None else 0
        longest = min(start + self.chunker.max_tokens, len(tokens) - 1)
        tails = tail_keys(_ROOT, tokens[start:longest], behind)
        return next((tail.end for tail in reversed(tails) if tail.prefix_key in self._prefixes), start)
