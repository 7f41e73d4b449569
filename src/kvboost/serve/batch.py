"""Answers the lines of a batch file through the server's own routes, without a socket.

Called by ``kvboost map``. Invariants: a line means what the same request means to ``kvboost serve``; every answer is
written, whole, before the next one; what is answered already is not asked again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvboost.engine import KVBoost
from kvboost.errors import ConfigError
from kvboost.scheduler.runner import BatchRunner
from kvboost.serve.app import ROUTES, make_app
from kvboost.serve.security.limits import Limits

_WINDOW = 1024  # lines sorted and held at a time
_NO_WAITING = 1 << 20  # prompt tokens between two decode steps: nobody waits for a token
_BEGINS = b'{"custom_id": "", "response": {"status_code": '  # every answer, but for its id
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Line:
    """One request of a file."""

    id: str
    path: str
    body: dict[str, Any]

    @property
    def beginning(self) -> str:
        """Sorts lines with equal beginnings next to each other."""
        return json.dumps(self.body.get("messages") or self.body.get("prompt") or self.body.get("input"))


def read_lines(file: Path, *, model_name: str) -> Iterator[Line]:
    """The requests of a file: OpenAI's batch format, or an object with ``prompt`` or ``messages`` in each line."""
    seen: dict[str, int] = {}
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file} is read twice and is no regular file; write the lines to a file first")
        with file.open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, 1):
                if text.strip():
                    line = _parsed(text, f"line {number} of {file.name}", number, model_name)
                    if (before := seen.setdefault(line.id, number)) != number:
                        raise ConfigError(f"line {number} of {file.name} has the custom_id of line {before}; rename it")
                    yield line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give a file of JSON lines in UTF-8") from error


def _parsed(text: str, where: str, number: int, model_name: str) -> Line:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}); write one object per line") from error
    if not isinstance(given, dict):
        raise ConfigError(f'{where} is no object; write {{"prompt": ...}} or {{"messages": [...]}}')
    if "body" in given:
        id, path, body = given.get("custom_id"), given.get("url"), given["body"]
        if not isinstance(body, dict) or ("POST", path) not in ROUTES or not isinstance(id, str):
            raise ConfigError(f"{where} needs a custom_id, a body, and a url such as {_CHAT}")
    else:
        path = _CHAT if "messages" in given else _COMPLETIONS
        id = str(given.pop("custom_id", number))
        body = given
        if path == _COMPLETIONS and "prompt" not in body:
            raise ConfigError(f"{where} asks nothing; give it a prompt, messages, or a body as OpenAI's batches have")
    if body.get("stream"):
        raise ConfigError(f"{where} asks for a stream, and a file has whole answers; leave stream out")
    return Line(id, str(path), {**body, "model": model_name})


def _is_final(status: int) -> bool:
    """Whether this is an answer. A failure of ours, or a line that came at a bad moment, is asked again."""
    return status < 500 and status not in (408, 429)


def answered(file: Path) -> tuple[set[str], int]:
    """The custom_ids that a file of answers has already, and its bytes without a last line that is not whole."""
    done, whole = set[str](), 0
    try:
        with file.open("r+b") as answers:  # for writing too: what cannot be written is said before the model is loaded
            for text in answers:
                if not text.endswith(b"\n") and _is_torn(text):
                    break
                whole += len(text)
                answer = json.loads(text)
                if _is_final(answer["response"]["status_code"]):
                    done.add(answer["custom_id"])
    except FileNotFoundError:
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"there is no directory {file.parent} for the answers; make it first") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no file of answers to go on with ({error!r}); give another name") from error
    return done, whole


def _is_torn(text: bytes) -> bool:
    """Whether a killed process may have left this of an answer. A file of somebody else's begins otherwise."""
    without_id = re.sub(rb'^(\{"custom_id": ")(?:\\.?|[^"\\])*', rb"\1", text)
    return without_id.startswith(_BEGINS) or _BEGINS.startswith(without_id)


@dataclass
class Totals:
    """What came of the lines of a file."""

    answered: int = 0  # those refused included
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


def answer_lines(
    engine: KVBoost, lines: Iterable[Line], out: Path, *, model_name: str, together: int, done: Callable[[], Any]
) -> Totals:
    """Append the answer of each line to ``out``, in the order in which they end; ``together`` generate side by side."""
    totals, waiting, ahead = Totals(), iter(lines), 2 * together
    limits = Limits(max_streams=ahead, max_waiting_prompts=ahead, max_total_body_bytes=ahead * Limits.max_body_bytes)
    jobs = ahead * limits.max_prompts * limits.max_choices  # of so many lines, at most: none is refused as one too many
    with (
        out.open("a", encoding="utf-8") as answers,
        BatchRunner(engine, max_running=together, max_waiting=jobs, chunk_budget=_NO_WAITING) as runner,
    ):
        app = make_app(engine, runner, model_name=model_name, limits=limits)
        app.state.service.grammars.prepare()

        def write(line: Line, status: int, body: Any) -> None:
            record = {"custom_id": line.id, "response": {"status_code": status, "body": body}, "error": None}
            answers.write(json.dumps(record, ensure_ascii=False) + "\n")
            answers.flush()
            usage = body.get("usage") or {}
            totals.answered += _is_final(status)
            totals.refused += _is_final(status) and status != 200
            totals.prompt_tokens += usage.get("prompt_tokens", 0)
            totals.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            done()

        try:
            while window := sorted(islice(waiting, _WINDOW), key=lambda line: line.beginning):
                asyncio.run(_answer(app, window, asyncio.Semaphore(ahead), write))
                if runner.load().failure:
                    break
            os.fsync(answers.fileno())
        finally:
            app.state.service.close()
    return totals


async def _answer(
    app: Any, lines: Sequence[Line], turn: asyncio.Semaphore, write: Callable[[Line, int, Any], None]
) -> None:
    """All of them, as many beside each other as there are turns."""

    async def one(line: Line) -> None:
        async with turn:
            if not app.state.service.runner.load().failure:  # it is for good: whoever comes now would fail too
                write(line, *await _post(app, line.path, json.dumps(line.body).encode()))

    async with asyncio.TaskGroup() as group:
        for line in lines:
            group.create_task(one(line))


async def _post(app: Any, path: str, body: bytes) -> tuple[int, Any]:
    """What the app answers: status and parsed body."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 0),
    }
    given = iter([{"type": "http.request", "body": body, "more_body": False}])
    parts: list[bytes] = []
    status = 500

    async def receive() -> dict[str, Any]:
        if (message := next(given, None)) is not None:
            return message
        await asyncio.Event().wait()  # nobody disconnects
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, json.loads(b"".join(parts))
