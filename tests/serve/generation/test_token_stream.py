from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvboost.scheduler.jobs import Finished, NewToken
from kvboost.serve.generation.token_stream import Ended, TokenStream, follow


class Scripted:
    """A ticket whose events are known, and that hears of its end too late."""

    def __init__(self, text: str = "") -> None:
        self._text = text
        self.cancelled = False

    def events(self) -> Iterator[NewToken | Finished]:
        yield from (NewToken(ord(letter)) for letter in self._text)
        yield Finished("cancelled" if self.cancelled else "length", None)

    def cancel(self) -> None:
        self.cancelled = True


def _decode(ids: object) -> str:
    return "".join(map(chr, ids))  # type: ignore[call-overload]


def test_tokens_that_come_after_a_stop_string_are_not_counted() -> None:
    ticket = Scripted("one two three")
    *_, last = follow(ticket, index=0, decode=_decode, stops=["two"], end_token_ids=frozenset())
    assert isinstance(last, Ended)
    assert ticket.cancelled
    assert (last.reason, last.text, _decode(last.token_ids), _decode(last.reply_ids)) == (
        "stop",
        "one ",
        "one two",
        "one ",
    )


def test_jobs_that_nobody_can_follow_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    tickets = [Scripted(), Scripted()]
    start, started = threading.Thread.start, []

    def starts(self: threading.Thread) -> None:
        if self.name == "kvboost-stream":
            started.append(self)
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
        start(self)

    async def enter() -> None:
        async with TokenStream(tickets, decode=_decode, stops=(), end_token_ids=frozenset()):
            pass

    monkeypatch.setattr(threading.Thread, "start", starts)
    with pytest.raises(RuntimeError, match="new thread"):
        asyncio.run(enter())
    assert [ticket.cancelled for ticket in tickets] == [True, True]
