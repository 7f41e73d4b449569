"""Threads for calls of a library: what happens when the machine has none."""

from __future__ import annotations

import threading

import pytest

from kvboost.store.tiers.remote import Calls


def test_threads_that_could_not_be_started_are_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(2, name="test")

    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="thread"):
                calls.submit(lambda _: 1, seconds=1.0)
    call = calls.submit(lambda _: 2, seconds=1.0)
    assert call.wait(30.0), "nobody does it"
    assert call.result() == 2
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        assert calls.submit(lambda _: 3, seconds=1.0).wait(30.0), "those that there are could have done it"
    calls.close()
    calls.join()
