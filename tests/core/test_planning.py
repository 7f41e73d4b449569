"""Planning a prompt takes work proportional to its length: counted, as times depend on the machine."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

import pytest

from kvboost.core import keys
from kvboost.core.chunking import FixedChunker
from kvboost.core.prefill import Prefiller
from kvboost.extend import TokenArray
from kvboost.steps import StepRule
from tests.core.test_state import prefiller


def planning(run: Prefiller, tokens: list[int], boundaries: Sequence[int]) -> Counter[str]:
    """What opening a prefill of these tokens takes: bytes hashed, tokens cut, functions called."""
    work: Counter[str] = Counter()

    class Hash:
        def __init__(self, data: bytes = b"", begun: Any = None) -> None:
            self._inner = begun or hashlib.sha256()
            self.update(data)

        def update(self, data: bytes) -> None:
            work["bytes hashed"] += len(data)
            self._inner.update(data)

        def copy(self) -> Self:
            return type(self)(begun=self._inner.copy())

        def digest(self) -> bytes:
            return self._inner.digest()

    cut = FixedChunker.cut

    def counted_cut(self: FixedChunker, ids: TokenArray, at: Sequence[int] = ()) -> list[int]:
        work["tokens cut"] += len(ids)
        return cut(self, ids, at)

    def count(frame: Any, event: str, arg: Any) -> None:
        work["functions called"] += event in ("call", "c_call")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "hashlib", SimpleNamespace(sha256=Hash))
        patch.setattr(FixedChunker, "cut", counted_cut)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            state = run.open(tokens, boundaries=boundaries)
        finally:
            sys.setprofile(before)
    state.close()
    return work


@pytest.mark.parametrize("rule", [None, StepRule(16, 16)], ids=["any step", "grid"])
@pytest.mark.parametrize(("tokens", "warm"), [(1000, False), (100, True)], ids=["cold", "warm"])
def test_twice_as_many_more_tokens_take_twice_as_much_more_work(tokens: int, warm: bool, rule: StepRule | None) -> None:
    def work(tokens: int) -> Counter[str]:
        run = prefiller(rule)  # with nothing stored
        text = [5 + 7 * at % 89 for at in range(tokens)]
        boundaries = range(40, tokens, 100)
        if warm:
            with run.open(text[:-10], boundaries=boundaries) as state:
                run.advance_to_last_step(state)
                run.finish(state)
                run.commit(state)
        return planning(run, text, boundaries)

    work(tokens)  # what is made once is made
    once, twice, four_times = (work(tokens * times) for times in (1, 2, 4))
    for kind in ("bytes hashed", "tokens cut", "functions called"):
        more, much_more = twice[kind] - once[kind], four_times[kind] - twice[kind]
        assert 0 < much_more <= 2.2 * more, kind  # chunks do not end evenly
    assert once["tokens cut"] == tokens, "in one pass"
    assert twice["bytes hashed"] - once["bytes hashed"] <= 16 * tokens, "4 for each of two keys, and labels"
