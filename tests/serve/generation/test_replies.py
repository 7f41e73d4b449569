from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kvboost.serve.generation import prompts
from kvboost.serve.generation.prompts import ChatPrompts, ReplyMemory, TextBefore
from kvboost.serve.generation.turns import Turn
from tests.helpers.tokenizer import byte_tokenizer


def test_a_text_that_grows_finds_what_the_whole_text_was_remembered_with() -> None:
    memory = ReplyMemory()
    for before, ids in (("one, ", [1, 2]), ("one, two, ", [3])):
        memory.remember(tenant="t", cache_key="", before=before, reply="yes", ids=ids)
    before = TextBefore("one, two, three")
    found: list[Any] = []
    for end in (5, 10, 5):
        before.grow(end)
        found.append(memory.find(tenant="t", cache_key="", before=before, reply="yes"))
    assert found == [[1, 2], [3], [3]]


def test_texts_are_hashed_before_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, held = ReplyMemory(), []
    make_keys = prompts._keys

    def keys(*given: Any) -> Any:
        held.append(memory._lock.locked())
        return make_keys(*given)

    monkeypatch.setattr(prompts, "_keys", keys)
    memory.remember(tenant="t", cache_key="", before="", reply="yes", ids=[1])
    assert memory.find(tenant="t", cache_key="", before="", reply="yes") == [1]
    assert held == [False, False]


class _Counting:
    """Counts what is hashed."""

    hashed = 0

    def __init__(self, data: bytes = b"", inner: Any = None) -> None:
        self._inner = inner if inner is not None else _sha256()
        self.update(data)

    def update(self, data: bytes) -> None:
        _Counting.hashed += len(data)
        self._inner.update(data)

    def copy(self) -> _Counting:
        return _Counting(inner=self._inner.copy())

    def digest(self) -> bytes:
        return bytes(self._inner.digest())


_sha256 = hashlib.sha256


def test_hashing_a_chat_takes_as_long_as_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.serve.generation.prompts.hashlib.sha256", _Counting)
    turns = [
        Turn({"role": role, "content": f"{role} {number} " * 5})
        for number in range(200)
        for role in ("user", "assistant")
    ]
    prompt = ChatPrompts(byte_tokenizer(), min_gap=4).encode(turns, tenant="t", cache_key="")
    assert len(prompt.text) / 2 < _Counting.hashed < 5 * len(prompt.text), "each turn once, not once per turn behind it"


def test_replies_of_one_tenant_can_be_forgotten() -> None:
    memory = ReplyMemory()
    for tenant in ("a", "b"):
        memory.remember(tenant=tenant, cache_key="", before="x", reply="yes", ids=[1, 2])
    memory.forget("a")
    assert memory.find(tenant="a", cache_key="", before="x", reply="yes") is None
    assert memory.find(tenant="b", cache_key="", before="x", reply="yes") == [1, 2]
    memory.forget("b")
    assert memory._bytes.total() == 0
