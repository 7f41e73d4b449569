"""Streams jobs: tokens to text, stop strings, and everything to the event loop.

Used by every endpoint that generates. Each job has a thread that waits for its tokens. Invariant: when a
:class:`TokenStream` is left, by its end, an error or a disconnect, all of its jobs are over or cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvboost.failures import log_failure
from kvboost.scheduler.jobs import Finished, NewToken, Ticket
from kvboost.serve.generation.text import Detokenizer, StopCutter
from kvboost.types import ReuseReport

_log = logging.getLogger("kvboost.serve")


@dataclass(frozen=True)
class Piece:
    """More text of one choice, and the tokens it came from."""

    index: int
    text: str
    tokens: tuple[NewToken, ...] = ()
    offsets: tuple[int, ...] = ()
    """For each token, how many characters of the answer are before it."""


@dataclass(frozen=True)
class Ended:
    """The end of one choice."""

    index: int
    reason: str
    """``stop``, ``length``, ``cancelled`` or ``error``."""
    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    """All that were produced."""
    reply_ids: tuple[int, ...] = field(repr=False)
    """Those of them that are the text: without end tokens and stop strings. Empty where these cannot be separated."""
    report: ReuseReport | None
    first_token_seconds: float | None
    error: str | None = None
    refused: bool = False
    """Whether the error is the request's own, and says what to change."""
    queued_seconds: float | None = None
    seconds: float | None = None
    """From ``submit`` until it was admitted, and to its end."""
    stop_string: str | None = None
    """The one that ended it."""
    mean_logprob: float | None = None
    """Over all tokens that were produced, the end token too; None where log-probabilities were not requested."""


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


def follow(
    ticket: Ticket,
    *,
    index: int,
    decode: Callable[[Sequence[int]], str],
    stops: Sequence[str],
    end_token_ids: frozenset[int],
) -> Iterator[Piece | Ended]:
    """The pieces of one job, then its end. Blocks. Cancels the job at a stop string."""
    detokenizer, cutter = Detokenizer(decode), StopCutter(stops)
    produced: list[int] = []
    logprobs: list[float] = []
    borders: list[int] = [0]  # characters before the token with this index
    decoded = 0
    waiting: list[tuple[NewToken, int]] = []  # tokens whose text has not been given out
    texts: list[str] = []
    given = 0
    stopped = False
    finished = Finished("error", None, error="the job ended without saying why")
    for event in ticket.events():
        if isinstance(event, Finished):
            finished = event
            break
        if stopped:
            continue  # computed before the job was cancelled; how many come so late is chance
        produced.append(event.token_id)
        if event.logprob is not None:
            logprobs.append(event.logprob)
        if event.token_id in end_token_ids:
            continue
        waiting.append((event, decoded))
        more = detokenizer.add(event.token_id)
        decoded += len(more)
        borders.append(decoded)
        text = cutter.add(more)
        if text:
            given += len(text)
            texts.append(text)
            yield _piece(index, text, waiting, up_to=given)
        stopped = cutter.found is not None
        if stopped:
            ticket.cancel()
    if not cutter.found:
        text = cutter.add(detokenizer.end())
        text += cutter.end()
        given += len(text)
        texts.append(text)
        if text or waiting:
            yield _piece(index, text, waiting, up_to=given + 1)
    elif waiting and waiting[0][1] < given:
        yield _piece(index, "", waiting, up_to=given)
    plain = [token for token in produced if token not in end_token_ids]
    if cutter.found:  # the tokens before it are the reply, if one of them ends where the stop string begins
        plain = plain[: borders.index(given)] if given in borders else []
    yield Ended(
        index=index,
        reason="stop" if cutter.found and finished.reason != "error" else finished.reason,
        text="".join(texts),
        token_ids=tuple(produced),
        reply_ids=tuple(plain),
        report=finished.report,
        first_token_seconds=finished.first_token_seconds,
        error=finished.error,
        refused=finished.refused,
        queued_seconds=finished.queued_seconds,
        seconds=finished.seconds,
        stop_string=cutter.found,
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
    )


def _piece(index: int, text: str, waiting: list[tuple[NewToken, int]], *, up_to: int) -> Piece:
    """A piece with those of the ``waiting`` tokens that begin before ``up_to`` characters."""
    ready = [entry for entry in waiting if entry[1] < up_to]
    waiting[:] = [entry for entry in waiting if entry[1] >= up_to]
    return Piece(index, text, tuple(token for token, _ in ready), tuple(offset for _, offset in ready))


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
        self._arguments = {"decode": decode, "stops": stops, "end_token_ids": end_token_ids}
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Piece | Ended] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        try:
            for index, ticket in enumerate(self._tickets):
                threading.Thread(target=self._follow, args=(index, ticket), name="kvboost-stream", daemon=True).start()
        except BaseException:  # no thread could be started, and ``__aexit__`` does not run for a failed entry
            self._cancel()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    def _cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()

    async def events(self) -> AsyncIterator[Piece | Ended]:
        """Events until all choices have ended."""
        left = len(self._tickets)
        while left:
            event = await self._events.get()
            left -= isinstance(event, Ended)
            yield event

    def _follow(self, index: int, ticket: Ticket) -> None:
        try:
            for event in follow(ticket, index=index, **self._arguments):  # type: ignore[arg-type]
                self._put(event)
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to: the client is told
            log_failure(_log, error, "an answer could not be read")
            ticket.cancel()
            self._put(Ended(index, "error", "", (), (), None, None, error=repr(error)))

    def _put(self, event: Piece | Ended) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has stopped, and nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
