"""What is brought up before a prefill is what the prefill will look for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.core.fetching import fetch
from kvboost.types import NOTHING_LOADED, Fetched, LoadReport

_EXACT, _CONTENT, _TAIL = (LoadReport({name: "disk"}) for name in (b"exact", b"content", b"tail"))


def fetched(*, known: int, first: int | None, tail: str | None, approx: bool) -> tuple[Fetched, list[Any]]:
    """Of a prompt with four chunks to look up, three of them usable elsewhere; and what was asked for."""
    asked: list[Any] = []

    def bring(chunks: Any) -> tuple[LoadReport, int]:
        asked.append(("exact", chunks))
        return (_TAIL, 1) if chunks == [tail] else (_EXACT, known)

    def bring_content(chunks: Any, *, after: int) -> LoadReport:
        asked.append(("content", chunks, after))
        return _CONTENT

    def first_wanted(chunks: Any, *, available: int) -> int | None:
        asked.append(("wanted", chunks, available))
        return first

    def stored_tail(prompt: Any, found: int) -> str | None:
        asked.append(("tail", prompt, found))
        return tail

    prefiller: Any = SimpleNamespace(
        store=SimpleNamespace(fetch=bring, fetch_content=bring_content),
        approx=SimpleNamespace(first_wanted=first_wanted),
        stored_tail=stored_tail,
    )
    prompt: Any = SimpleNamespace(lookup="0123", usable="012")
    found = fetch(prefiller, prompt, approx=approx)
    assert ("tail", prompt, known) in asked
    return found, [entry for entry in asked if entry[0] != "tail"]


def test_leading_chunks_and_the_end_of_an_earlier_prompt_are_brought_up() -> None:
    assert fetched(known=2, first=0, tail=None, approx=False) == (Fetched(_EXACT, NOTHING_LOADED), [("exact", "0123")])
    found, asked = fetched(known=2, first=0, tail="a tail", approx=False)
    assert found.exact.tiers == {b"exact": "disk", b"tail": "disk"}
    assert asked == [("exact", "0123"), ("exact", ["a tail"])]


@pytest.mark.parametrize(("known", "available"), [(1, 1), (4, 3)])
def test_chunks_elsewhere_are_wanted_behind_what_is_there(known: int, available: int) -> None:
    found, asked = fetched(known=known, first=2, tail=None, approx=True)
    assert found == Fetched(_EXACT, _CONTENT)
    assert asked == [("exact", "0123"), ("wanted", "012", available), ("content", "012", 2)]


@pytest.mark.parametrize("first", [None, 3])
def test_nothing_elsewhere_is_brought_up_if_nothing_is_wanted(first: int | None) -> None:
    found, asked = fetched(known=1, first=first, tail=None, approx=True)
    assert found == Fetched(_EXACT, NOTHING_LOADED)
    assert [entry[0] for entry in asked] == ["exact", "wanted"]
