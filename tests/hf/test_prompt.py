from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost.errors import ConfigError
from kvboost.hf.prompt import PromptEncoder

_IDS = [3, 4, 5]


def _encode(**prompt: Any) -> list[int]:
    return PromptEncoder(None, max_tokens=None, vocab_size=10).encode(prompt)


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"attention_mask": [1, 1, 1]},
        {"attention_mask": torch.ones(1, 3, dtype=torch.long)},
        {"attention_mask": None},
        {"token_type_ids": [0, 0, 0]},
        {"offset_mapping": [(0, 1), (1, 2), (2, 3)], "special_tokens_mask": [1, 0, 0], "length": [3]},
    ],
)
def test_what_a_tokenizer_returns_is_a_prompt(beside: dict[str, Any]) -> None:
    assert _encode(input_ids=_IDS, **beside) == _IDS
    assert _encode(input_ids=torch.tensor([_IDS]), **beside) == _IDS


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"attention_mask": [0, 1, 1]}, "attention_mask.*padding"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "attention_mask.*padding"),
        ({"attention_mask": [1, 1]}, "attention_mask.*2.*3 tokens"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention_mask.*9.*3 tokens"),
        ({"token_type_ids": [0, 1, 1]}, "token_type_ids.*model.generate"),
        ({"pixel_values": torch.zeros(1, 3, 2, 2)}, "pixel_values.*model.generate"),
        ({"position_ids": [1, 2, 3]}, "position_ids.*model.generate"),
    ],
)
def test_what_the_model_would_see_beside_the_tokens_is_refused(beside: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _encode(input_ids=_IDS, **beside)


def test_a_mapping_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="input_ids"):
        _encode(inputs_embeds=torch.zeros(1, 3, 4))
