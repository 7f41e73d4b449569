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
        {"temperature": 0.7, "top_k": 9, "min_p": 0.1, "repetition_penalty": 1.3, "min_new_tokens": 9},
    ],
)
@pytest.mark.parametrize("constraint", [None, _forbid_evens])
def test_no_processor_waits_for_the_device(settings: dict[str, Any], constraint: Any) -> None:
    def made(device: str) -> Any:
        return logits_processors(
            Sampling(**settings),
            constraint,
            _GENERATED[0].tolist(),
            prompt=[3, 8, 8],
            end_token_ids={2, 9},
            device=device,
        )

    right = made("cpu")(_GENERATED, _SCORES)
    with Devices() as seen:
        found = made("cuda:0")(_GENERATED, on_device(_SCORES, "cuda:0"))
        assert not seen.of("wait"), seen.of("wait")
        assert not seen.of("download")
    assert torch.equal(host(found), right)


def test_penalties_count_each_token() -> None:
    processors = logits_processors(Sampling(presence_penalty=0.5, frequency_penalty=0.25), None, _GENERATED[0].tolist())
    penalty = _SCORES - processors(_GENERATED, _SCORES)
    expected = torch.zeros(1, 50)
    expected[0, 3], expected[0, 7], expected[0, 49] = 1.25, 0.75, 0.75
    assert torch.allclose(penalty, expected, atol=1e-6)


def _allowed(scores: torch.Tensor) -> set[int]:
    return {token for token, score in enumerate(scores[0].tolist()) if score > -torch.inf}


def test_the_likeliest_are_kept() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.9, -1.0]])
    none = torch.zeros(1, 0, dtype=torch.long)

    def kept(**settings: Any) -> set[int]:
        return _allowed(logits_processors(Sampling(temperature=1.0, **settings), None, [])(none, scores))

    assert kept(top_k=2) == {1, 3}
    assert kept(top_k=99) == kept(min_p=0.0) == {0, 1, 2, 3, 4}
    assert kept(min_p=0.1) == {1, 2, 3}, "a tenth of the likeliest: e**-2 is 0.14, e**-3 is 0.05"


def test_a_repetition_penalty_counts_the_prompt_and_each_token_once() -> None:
    scores = torch.tensor([[2.0, 2.0, -2.0, 2.0]])
    sampling = Sampling(repetition_penalty=2.0)
    processors = logits_processors(sampling, None, [1, 1], prompt=[2, 2, 3])
    assert processors(torch.tensor([[1, 1]]), scores).tolist() == [[2.0, 1.0, -4.0, 1.0]]


def test_no_end_before_the_least_length() -> None:
    processors = logits_processors(Sampling(min_new_tokens=2), None, [], end_token_ids={7, 49})
    before, after = (torch.zeros(1, count, dtype=torch.long) for count in (1, 2))
    assert _allowed(processors(before, _SCORES)) == set(range(50)) - {7, 49}
    assert _allowed(processors(after, _SCORES)) == set(range(50))
