from __future__ import annotations

import pytest

from kvboost.core.non_prefix import NonPrefixReuse
from tests.contracts.content import prompt


@pytest.mark.parametrize("reason", [None, "this model has no rotary positions"])
def test_without_non_prefix_reuse_nothing_is_found_and_it_says_why(reason: str | None) -> None:
    off, chunks = NonPrefixReuse(reason), prompt("a")
    assert off.find(chunks, available=0, prompt_tokens=9) == (None, reason)
    assert off.first_wanted(chunks, available=0) is None
    assert off.boundaries([1, 2]) == ()
    assert off.describe() == f"off: {reason or 'by the settings'}"
    assert off.stats() == {
        "allowed": False,
        "reason": reason,
        "checked": 0,
        "differing": 0,
        "differing_at_most": 1.0,
    }
