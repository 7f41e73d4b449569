"""Adapters as models of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model

from kvboost import ConfigError, KVBoost
from kvboost.serve import ServerConfig
from tests.helpers.models import tiny_model
from tests.serve.conftest import Running


@pytest.fixture(scope="module")
def running(
    start_server: Callable[..., Running],
    make_engine: Callable[..., KVBoost],
    tmp_path_factory: pytest.TempPathFactory,
) -> Running:
    folder: Path = tmp_path_factory.mktemp("adapters") / "poet"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = tiny_model("llama", vocab_size=260, max_position_embeddings=2048)
        get_peft_model(model, config).save_pretrained(folder)
    engine = make_engine()
    engine.load_adapter("poet", str(folder))
    return start_server(engine, adapters=["poet"])


def test_an_adapter_is_a_model_of_its_own(running: Running) -> None:
    asked: dict[str, Any] = {"prompt": "once upon a time there was " * 4, "max_tokens": 8, "temperature": 0}
    with running.openai() as client:
        assert [model.id for model in client.models.list()] == ["tiny", "poet"]
        assert client.models.retrieve("poet").parent == "tiny"  # type: ignore[attr-defined]
        told: dict[str, list[Any]] = {"tiny": [], "poet": []}
        for name in ("tiny", "poet", "tiny", "poet"):
            answer = client.completions.create(model=name, **asked)
            assert answer.model == name
            told[name].append(answer)
        with pytest.raises(openai.NotFoundError, match="tiny, poet only"):
            client.completions.create(model="painter", **asked)
    texts = {name: {answer.choices[0].text for answer in answers} for name, answers in told.items()}
    assert all(len(said) == 1 for said in texts.values())
    assert texts["tiny"] != texts["poet"]
    for first, second in told.values():
        assert first.usage.prompt_tokens_details.cached_tokens == 0, "nothing of the other model's"
        assert second.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("given", [("poet",), ("=path",), ("poet=",), ("poet=a", "poet=b"), ("tiny=a",)], ids=str)
def test_an_adapter_needs_a_name_and_a_path(given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--adapter NAME=PATH"):
        ServerConfig(served_model_name="tiny", adapter=given)
