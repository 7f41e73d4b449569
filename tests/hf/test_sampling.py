from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost.hf.sampling import Sampling, logits_processors
from tests.helpers.devices import Devices, host, on_device

_SCORES = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
_GENERATED = torch.tensor([[3, 7, 3, 3, 49]])


def _forbid_evens(generated: list[int], scores: torch.Tensor) -> None:
    assert generated == [3, 7, 3, 3, 49]
    scores[::2] = -torch.inf


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"temperature": 0.7, "top_p": 0.9, "logit_bias": {3: 1.0, 5: -2.0}},
    ],
)
@pytest.mark.parametrize("constraint", [None, _forbid_evens])
def test_no_processor_waits_for_the_device(settings: dict[str, Any], constraint: Any) -> None:
    right = logits_processors(Sampling(**settings), constraint, _GENERATED[0].tolist())(_GENERATED, _SCORES)
    processors = logits_processors(Sampling(**settings), constraint, _GENERATED[0].tolist())
    with Devices() as seen:
        found = processors(_GENERATED, on_device(_SCORES, "cuda:0"))
        assert not seen.of("wait"), seen.of("wait")
        assert not seen.of("download")
    assert torch.equal(host(found), right)


def test_penalties_count_each_token() -> None:
    processors = logits_processors(Sampling(presence_penalty=0.5, frequency_penalty=0.25), None, _GENERATED[0].tolist())
    penalty = _SCORES - processors(_GENERATED, _SCORES)
    expected = torch.zeros(1, 50)
    expected[0, 3], expected[0, 7], expected[0, 49] = 1.25, 0.75, 0.75
    assert torch.allclose(penalty, expected, atol=1e-6)
