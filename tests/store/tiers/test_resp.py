"""The protocol on a socket: whatever the pieces it comes in, whatever comes, and never longer than asked."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.store.tiers.redis.resp import Deadline, Link, ProtocolError, Reply, ServerError


def deadline(seconds: float = 30.0) -> Deadline:
    return Deadline(seconds, min_bytes_per_s=1e6)


def encode(reply: Reply | str) -> bytes:
    if isinstance(reply, str):
        return b"+" + reply.encode() + b"\r\n"
    if isinstance(reply, ServerError):
        return b"-" + str(reply).encode() + b"\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))


simple = st.integers(-(10**17), 10**17) | st.binary(max_size=40_000) | st.none()
replies = st.recursive(simple, lambda inner: st.lists(inner, max_size=4), max_leaves=10).filter(
    lambda reply: not isinstance(reply, list) or str(reply).count("[") < 4
)


@given(st.lists(replies, min_size=1, max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_replies_are_read_however_they_are_cut(wanted: list[Reply], data: st.DataObject) -> None:
    stream = b"".join(map(encode, wanted))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def send() -> None:
            for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
                theirs.sendall(stream[begin:end])

        sender = threading.Thread(target=send)
        sender.start()
        link = Link(ours, deadline())
        assert [link.reply() for _ in wanted] == wanted
        sender.join()


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_garbage_is_an_error_of_the_protocol_or_the_end(garbage: bytes) -> None:
    for read in (lambda link: link.reply(), lambda link: link.length()):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(garbage)
            theirs.shutdown(socket.SHUT_WR)
            try:
                read(Link(ours, deadline()))
            except (ProtocolError, OSError, ServerError):
                continue


@pytest.mark.parametrize(
    "reply",
    [b"$99999999999\r\n", b"*99999999\r\n", b"$-2\r\n", b"$1_0\r\n", b":\r\n", b"\r\n", b"?3\r\n", b"*1\r\n" * 9],
)
def test_lengths_that_nobody_would_send_are_not_believed(reply: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(reply)
        with pytest.raises(ProtocolError):
            Link(ours, deadline()).reply()


def test_values_go_out_whole_and_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    large = bytes(range(256)) * 4000
    parts = tuple(memoryview(large)[begin : begin + 1000] for begin in range(0, len(large), 1000))
    with ours, theirs:
        got = bytearray()

        def receive() -> None:
            while data := theirs.recv(10_000):
                got.extend(data)

        receiver = threading.Thread(target=receive)
        receiver.start()
        Link(ours, deadline()).send([(b"SET", b"k", parts), (b"SET", b"k", memoryview(large)), (b"GET", b"k")])
        ours.shutdown(socket.SHUT_WR)
        receiver.join()
    value = b"$%d\r\n%s\r\n" % (len(large), large)
    head = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n"
    assert bytes(got) == head + value + head + value + b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"


@pytest.mark.parametrize("what", ["nothing", "dribble", "sending"])
def test_nobody_waits_longer_than_his_patience(what: str) -> None:
    ours, theirs = socket.socketpair()
    stop = threading.Event()
    with ours, theirs:

        def dribble() -> None:
            theirs.sendall(b"$1000\r\n")
            while not stop.wait(0.002):
                theirs.sendall(b"x")

        sender = threading.Thread(target=dribble)
        if what == "dribble":
            sender.start()
        link = Link(ours, deadline(0.1))
        command = (b"SET", b"k", memoryview(bytes(10**8)))
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            link.send([command]) if what == "sending" else link.reply()
        assert time.monotonic() - begin < 1.0
        stop.set()
        if what == "dribble":
            sender.join()


def test_what_has_come_already_is_taken_though_time_is_over() -> None:
    """A process that was held up does not blame the server."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode(b"here"))
        assert Link(ours, deadline(0.0)).reply() == b"here"


def test_a_link_with_something_unread_is_not_used_again() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Link(ours, deadline())
        assert link.is_fresh
        theirs.sendall(b"+late\r\n")
        assert not link.is_fresh
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        assert not Link(ours, deadline()).is_fresh
