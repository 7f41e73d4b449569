from __future__ import annotations

import torch

from benchmarks.common.strategies import STRATEGIES, Query, Selective
from tests.approx.test_select import situation


def test_the_known_ways_choose_what_their_names_say() -> None:
    given = situation([8, 16], ratio=0.25)
    assert given.positions[Selective(overlap=2).choose(given)].tolist() == [16, 17, 37, 38]
    assert given.positions[STRATEGIES["first"].choose(given)].tolist() == [10, 11, 23, 24, 25, 26]
    chosen = Query().choose(given)
    assert given.attention is not None
    assert torch.equal(chosen, chosen.unique())
    assert given.attention[chosen].min() >= given.attention.sort(descending=True).values[given.budget - 1]
