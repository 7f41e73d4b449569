from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from kvboost.errors import ConfigError
from kvboost.hf.generate import sampling_arguments


def _checked(**extra: Any) -> dict[str, Any]:
    return sampling_arguments(prompt_tokens=4, options={"max_new_tokens": 2, "temperature": None, **extra})


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("adapter_names", "set_adapter"),
        ("alora_offsets", "model.generate"),
        ("pixel_values", "model.generate"),
        ("token_type_ids", "model.generate"),
        ("encoder_outputs", "model.generate"),
        ("logits_to_keep", "model.generate"),
        ("inputs_embeds", "prepared by the engine"),
        ("position_ids", "prepared by the engine"),
        ("prefill_chunk_size", "prepared by the engine"),
        ("attention_mask", "prepared by the engine"),
        ("transformers_version", "model.generate"),
        ("temprature", "did you mean temperature"),
        ("quality", "give it to KVBoost"),
        ("max_token", "did you mean max_"),
        ("_from_model_config", "model.generate"),
    ],
)
def test_arguments_that_reach_the_forward_are_refused_by_name(argument: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"{argument}.*{advice}"):
        _checked(**{argument: None})


@pytest.mark.parametrize("setting", [{"use_cache": False}, {"token_healing": True}, {"prefill_chunk_size": 7}])
def test_a_generation_config_may_not_ask_for_it_either(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}.*generation_config"):
        _checked(generation_config=GenerationConfig(**setting))


def test_what_only_chooses_tokens_goes_through() -> None:
    given: dict[str, Any] = {
        "top_p": 0.5,
        "num_beams": 2,
        "stop_strings": ["x"],
        "output_scores": True,
        "logits_processor": [],
        "stopping_criteria": [],
        "prefix_allowed_tokens_fn": None,
        "assistant_model": None,
        "streamer": None,
        "tokenizer": None,
        "synced_gpus": False,
        "guidance_scale": 1.5,
        "negative_prompt_ids": None,
        "generation_config": GenerationConfig(top_k=3),
    }
    assert _checked(**given) == {**given, "max_new_tokens": 2}
