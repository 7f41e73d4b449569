"""Threads for calls of a library: what happens when the machine has none."""

from __future__ import annotations

import threading

import pytest

from kvboost.store.tiers.remote import Breaker, Guard, Patience, UnavailableError


def test_threads_that_could_not_be_started_are_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    patience, breaker = Patience(1.0, 1e6), Breaker(lambda: True, name="test-look")
    calls = Guard(2, name="test", patience=patience, breaker=breaker)

    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        for _ in range(3):
            with pytest.raises(UnavailableError, match="thread"):
                calls.submit(lambda _: 1)
    call = calls.submit(lambda _: 2)
    assert call.wait(30.0), "nobody does it"
    assert call.result() == 2
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        assert calls.submit(lambda _: 3).wait(30.0), "those that there are could have done it"
    calls.close()
    calls.join()
