from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.core.spans import ApproxSpans, repair_end
from kvboost.types import KVBlock


@pytest.mark.parametrize(("tokens", "end"), [(512, 0), (513, 400), (612, 100), (613, 400)])
def test_a_repair_leaves_a_question_of_512_tokens_to_the_last_step(tokens: int, end: int) -> None:
    assert repair_end(tokens, moved_end=100 if tokens > 600 else 0, cut_end=400) == end


def _block(depth: int) -> KVBlock:
    return KVBlock(b"k", None, b"c", b"", (), 0, bitwise=False, approx_depth=depth)


def test_what_follows_is_one_deeper_than_the_deepest() -> None:
    assert ApproxSpans("none", {0: _block(0)}).depth == 1
    assert ApproxSpans("none", {0: _block(2), 1: _block(1)}).depth == 3


def test_releasing_leaves_the_lease_and_the_slot() -> None:
    released: list[str] = []

    def held(name: str) -> Any:
        return SimpleNamespace(release=lambda: released.append(name))

    ApproxSpans("none", {}, lease=held("lease")).release()
    assert released == ["lease"]
    ApproxSpans("none", {}, lease=held("lease"), slot=held("slot")).release()
    assert released == ["lease", "lease", "slot"]
