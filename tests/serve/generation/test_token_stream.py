from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.scheduler.jobs import Finished, NewToken
from kvboost.serve.generation.token_stream import Ended, Piece, StopCutter, TokenStream, token_bytes
from tests.helpers.runner import Scripted
from tests.helpers.tokenizer import byte_tokenizer, pieces_tokenizer


class _Ticket(Scripted):
    """A ticket that hears of its end too late."""

    def __init__(self, text: str = "") -> None:
        self._text = text
        self.cancelled = 0

    def events(self) -> Iterator[NewToken | Finished]:
        yield from (NewToken(ord(letter)) for letter in self._text)
        yield Finished("cancelled" if self.cancelled else "length", None)

    def cancel(self) -> None:
        self.cancelled += 1


def _decode(ids: object) -> str:
    return "".join(map(chr, ids))  # type: ignore[call-overload]


def _all(
    tickets: list[Any], *, decode: Callable[[Any], str] = _decode, stops: tuple[str, ...] = ()
) -> list[Piece | Ended]:
    async def read() -> list[Piece | Ended]:
        async with TokenStream(tickets, decode=decode, stops=stops, end_token_ids=frozenset()) as stream:
            return [event async for event in stream.events()]

    return asyncio.run(read())


def test_tokens_that_come_after_a_stop_string_are_not_counted() -> None:
    ticket = _Ticket("one two three")
    *_, last = _all([ticket], stops=("two",))
    assert isinstance(last, Ended)
    assert ticket.cancelled
    assert (last.reason, last.text, _decode(last.token_ids), _decode(last.reply_ids)) == (
        "stop",
        "one ",
        "one two",
        "one ",
    )


def test_a_choice_that_cannot_be_read_ends_with_an_error_and_no_other() -> None:
    tickets = [_Ticket("good"), _Ticket("bad!"), _Ticket("good")]

    def decode(ids: Any) -> str:
        if ord("!") in ids:
            raise ValueError("not text")
        return _decode(ids)

    ends = {event.index: event for event in _all(tickets, decode=decode) if isinstance(event, Ended)}
    assert [(ends[index].reason, ends[index].text) for index in range(3)] == [
        ("length", "good"),
        ("error", ""),
        ("length", "good"),
    ]
    assert ends[1].error == "ValueError('not text')"
    assert tickets[1].cancelled > tickets[0].cancelled


def test_what_comes_after_the_stream_is_left_is_not_read() -> None:
    class Late(_Ticket):
        def listen(self, deliver: Callable[[NewToken | Finished], None]) -> None:
            self.deliver = deliver

    ticket, read = Late(), []

    def decode(ids: Any) -> str:
        read.append(ids)
        return _decode(ids)

    async def leave() -> None:
        async with TokenStream([ticket], decode=decode, stops=(), end_token_ids=frozenset()):
            pass
        ticket.deliver(NewToken(65))
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert ticket.cancelled == 1
    assert not read
    ticket.deliver(NewToken(65))  # the loop is closed


@pytest.mark.parametrize("early", [0, 3])
def test_a_ticket_delivers_what_came_before_somebody_listened(early: int) -> None:
    from kvboost.scheduler.jobs import Ticket

    ticket, heard = Ticket(lambda: None), []
    events = [NewToken(1), NewToken(2), Finished("length", None)]
    for event in events[:early]:
        ticket.put(event)
    ticket.listen(heard.append)
    for event in events[early:]:
        ticket.put(event)
    assert heard == events


@settings(deadline=None)  # the machine may be busy
@given(
    st.text(alphabet="abc", max_size=40),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3),
    st.data(),
)
def test_text_is_cut_at_the_first_stop_string_however_it_comes(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cutter = StopCutter(stops)
    out, at = "", 0
    while at < len(text):
        step = data.draw(st.integers(1, 6))
        out += cutter.add(text[at : at + step])
        at += step
    out += cutter.end()
    places = [text.find(stop) for stop in stops if stop in text]
    if places:
        # Text that comes in pieces can complete a long stop string after a shorter one that begins later.
        assert cutter.found
        assert not any(stop in out for stop in stops)
        assert text.startswith(out)
        assert len(out) >= min(places)
    else:
        assert out == text
        assert not cutter.found


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    cutter = StopCutter(["END", "\n\n"])
    assert cutter.add("one\n") == "one"
    assert cutter.add("two EN") == "\ntwo "
    assert cutter.add("Dless") == ""
    assert cutter.found
    assert cutter.add("more") == ""


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), pieces_tokenizer()], ids=["bytes", "pieces"])
def test_bytes_of_tokens(tokenizer: Any) -> None:
    of = token_bytes(tokenizer)
    ids = tokenizer("Grüße 🙂", add_special_tokens=False)["input_ids"]
    assert len(ids) >= len("Grüße 🙂".encode()) - 1
    assert b"".join(of(token) for token in ids).strip() == "Grüße 🙂".encode()


def test_bytes_of_words_and_special_tokens() -> None:
    assert token_bytes(pieces_tokenizer())(257) == b" der"
    assert token_bytes(byte_tokenizer())(2) == b"</s>"
