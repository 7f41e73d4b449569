"""Reads a log of prompts: JSON Lines with ``{"prompt": text}`` or ``{"messages": [...]}``.

Used by ``kvboost explain``. Invariant: every error names the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvboost.errors import ConfigError


@dataclass(frozen=True)
class LogRecord:
    """One request of the log: a text, or the messages of a chat."""

    line: int
    prompt: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    """What the template is given besides the messages."""


def read_log(file: Path) -> list[LogRecord]:
    """The requests in ``file``, in its order. Blank lines are skipped, and so are fields with other names."""
    try:
        # Not splitlines(): it also splits at characters that JSON leaves as they are inside a string.
        lines = file.expanduser().read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); give a file of JSON Lines") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 ({error.reason}); give a file of JSON Lines") from error
    records = [_record(line, file, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise ConfigError(f'{file} is empty; give a log with one {{"prompt": text}} or {{"messages": [...]}} per line')
    return records


def _record(line: str, file: Path, number: int) -> LogRecord:
    where = f"{file}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error}); repair that line") from error
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        return LogRecord(number, prompt=record["prompt"])
    messages = record.get("messages") if isinstance(record, dict) else None
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


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content in parts becomes one text, as the server makes it; what is no text is left out."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return {**message, "content": "\n".join(texts)}
