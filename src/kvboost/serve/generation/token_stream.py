"""Streams jobs: tokens to text, stop strings, and everything to the event loop.

Used by every endpoint that generates. The runner's thread hands each token to the loop, which makes text of it.
Invariant: when a :class:`TokenStream` is left, by its end, an error or a disconnect, all of its jobs are over or
cancelled.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from kvboost.engine.text_stream import Detokenizer
from kvboost.failures import log_failure
from kvboost.scheduler.jobs import Finished, NewToken, Ticket
from kvboost.serve.generation.parts import overlap

_log = logging.getLogger("kvboost.serve")


@dataclass(frozen=True)
class Piece:
    """More text of one choice, and the tokens it came from."""

    index: int
    text: str
    tokens: tuple[NewToken, ...] = ()
    offsets: tuple[int, ...] = ()
    """For each token, how many characters of the answer are before it."""


@dataclass(frozen=True, kw_only=True)
class Ended(Finished):
    """The end of one choice."""

    index: int
    text: str = field(default="", repr=False)
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    """All that were produced."""
    reply_ids: tuple[int, ...] = field(default=(), repr=False)
    """Those of them that are the text: without end tokens and stop strings. Empty where these cannot be separated."""
    stop_string: str | None = None
    """The one that ended it."""


def milliseconds(seconds: float | None) -> float | None:
    """As records and answers tell times."""
    return round(seconds * 1000, 3) if seconds is not None else None


def seconds_per_token(choices: Sequence[Ended]) -> float | None:
    """What a token after the first took, on average over all choices; None where there is no such token."""
    decoded = [
        (choice.seconds - choice.first_token_seconds, len(choice.token_ids) - 1)
        for choice in choices
        if choice.seconds is not None and choice.first_token_seconds is not None
    ]
    tokens = sum(count for _, count in decoded)
    return sum(seconds for seconds, _ in decoded) / tokens if tokens > 0 else None


class StopCutter:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str) -> str:
        """The text that is certain not to belong to a stop string. Nothing after one was found."""
        if self.found is not None:
            return ""
        self._held += text
        starts = [(start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if starts:
            cut, self.found = min(starts)
            piece, self._held = self._held[:cut], ""
            return piece
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        piece, self._held = self._held[:cut], self._held[cut:]
        return piece

    def end(self) -> str:
        """What was held back, if no stop string came of it."""
        piece, self._held = self._held, ""
        return piece


class Choice:
    """Makes text of one job's tokens, up to a stop string."""

    def __init__(
        self,
        index: int,
        *,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        end_token_ids: frozenset[int],
    ) -> None:
        self._index, self._end_token_ids = index, end_token_ids
        self._detokenizer, self._cutter = Detokenizer(decode), StopCutter(stops)
        self._produced: list[int] = []
        self._borders = [0]  # characters before the token with this index
        self._decoded = self._given = 0  # characters
        self._waiting: list[tuple[NewToken, int]] = []  # tokens whose text has not been given out
        self._texts: list[str] = []

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended it: what comes now was computed before the job is cancelled."""
        return self._cutter.found is not None

    def add(self, token: NewToken) -> Piece | None:
        """What is certain with one more token, if there is anything new."""
        if self.is_stopped:
            return None  # how many come so late is chance
        self._produced.append(token.token_id)
        if token.token_id in self._end_token_ids:
            return None
        self._waiting.append((token, self._decoded))
        more = self._detokenizer.add(token.token_id)
        self._decoded += len(more)
        self._borders.append(self._decoded)
        text = self._cutter.add(more)
        return self._give(text) if text else None

    def end(self, finished: Finished) -> Iterator[Piece | Ended]:
        """What was held back, then the end."""
        found = self._cutter.found
        if not found:
            text = self._cutter.add(self._detokenizer.end())
            text += self._cutter.end()
            found = self._cutter.found
            if text or self._waiting:
                yield self._give(text, more=1)
        elif self._waiting and self._waiting[0][1] < self._given:
            yield self._give("")
        plain = [token for token in self._produced if token not in self._end_token_ids]
        if found:  # the tokens before it are the reply, if one of them ends where the stop string begins
            plain = plain[: self._borders.index(self._given)] if self._given in self._borders else []
        yield Ended(
            **vars(finished)
            | {
                "index": self._index,
                "reason": "stop" if found and finished.reason != "error" else finished.reason,
                "text": "".join(self._texts),
                "token_ids": tuple(self._produced),
                "reply_ids": tuple(plain),
                "stop_string": found,
            }
        )

    def _give(self, text: str, *, more: int = 0) -> Piece:
        """A piece with the waiting tokens that begin before its end, or ``more`` characters after it."""
        self._given += len(text)
        if text:
            self._texts.append(text)
        ready = [entry for entry in self._waiting if entry[1] < self._given + more]
        self._waiting = [entry for entry in self._waiting if entry[1] >= self._given + more]
        return Piece(self._index, text, tuple(token for token, _ in ready), tuple(offset for _, offset in ready))


class TokenStream:
    """The events of several jobs. An async context manager; iterate over it once."""

    def __init__(
        self,
        tickets: Sequence[Ticket],
        *,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        end_token_ids: frozenset[int],
    ) -> None:
        self._tickets = tickets
        self._choices = [
            Choice(index, decode=decode, stops=stops, end_token_ids=end_token_ids) for index in range(len(tickets))
        ]
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Piece | Ended] = asyncio.Queue()
        self._over: set[int] = set()
        """Choices that have ended, or that nobody waits for any more."""

    async def __aenter__(self) -> Self:
        for index, ticket in enumerate(self._tickets):
            ticket.listen(partial(self._deliver, index))
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._over.update(range(len(self._tickets)))
        for ticket in self._tickets:
            ticket.cancel()

    async def events(self) -> AsyncIterator[Piece | Ended]:
        """Events until all choices have ended."""
        left = len(self._tickets)
        while left:
            event = await self._events.get()
            left -= isinstance(event, Ended)
            yield event

    def _deliver(self, index: int, event: NewToken | Finished) -> None:
        """In the thread that runs the job."""
        with suppress(RuntimeError):  # the loop is closed: the server has stopped, and nobody listens
            self._loop.call_soon_threadsafe(self._read, index, event)

    def _read(self, index: int, event: NewToken | Finished) -> None:
        """On the loop. An error ends the choice, with an event for the client."""
        if index in self._over:
            return
        choice = self._choices[index]
        try:
            if isinstance(event, Finished):
                self._over.add(index)
                for last in choice.end(event):
                    self._events.put_nowait(last)
            elif (piece := choice.add(event)) is not None:
                self._events.put_nowait(piece)
            if choice.is_stopped:
                self._tickets[index].cancel()
        except Exception as error:  # noqa: BLE001 - a callback of the loop has nobody to raise to
            log_failure(_log, error, "an answer could not be read")
            self._over.add(index)
            self._tickets[index].cancel()
            self._events.put_nowait(Ended(reason="error", report=None, error=repr(error), index=index))


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """A function that gives the bytes of a token, which need not be whole characters."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str()).get("decoder") if backend is not None else None
    if '"ByteLevel"' in json.dumps(decoder):
        table = {char: byte for byte, char in _byte_characters().items()}

        def of_byte_level(token_id: int) -> bytes:
            token = tokenizer.convert_ids_to_tokens(token_id) or ""
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
            return str(token).encode()  # an added token, written as it is

        return of_byte_level

    def of_pieces(token_id: int) -> bytes:
        token = str(tokenizer.convert_ids_to_tokens(token_id) or "")
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    return of_pieces


def _byte_characters() -> dict[int, str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + index) for index, byte in enumerate(others)}
