"""TRL's GRPO trainer with an attached model: a group reads its prompt once, and never with the weights of before.

Runs where TRL is installed (``.ci/programs``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import kvboost
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

pytest.importorskip("trl")

_GROUP, _NEW, _STEPS = 8, 6, 3
_PROMPT = "The mill burned down in 1911 and was rebuilt of stone. " * 4


class _Trained(NamedTuple):
    samples: list[Any]
    forwards: list[tuple[int, int, int]]
    """While sampling: rows, tokens, and tokens already in the cache."""
    digests: set[str]
    """Of the weights, as the engine knows them after each step."""


def _train(folder: Path, *, attached: bool, **settings: Any) -> _Trained:
    """Three steps of one group each, all with the same prompt."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = tiny_model("llama", vocab_size=260, max_position_embeddings=1024)
    if attached:
        kvboost.attach(model, chunk_size=16)
    found = _Trained([], [], set())

    def reward(prompts: list[str], completions: list[str], **given: Any) -> list[float]:
        found.samples.append(given["completion_ids"])
        if attached:
            found.digests.add(model.kvboost.session.prefiller.keys.identity.snapshot().fields["weights"])
        return [float(len(set(tokens))) for tokens in given["completion_ids"]]

    def look(module: Any, args: Any, given: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            cache = given.get("past_key_values")
            found.forwards.append((*given["input_ids"].shape, cache.get_seq_length() if cache is not None else 0))

    model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
    args = GRPOConfig(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=_GROUP,
        num_generations=_GROUP,
        max_completion_length=_NEW,
        max_steps=_STEPS,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    prompts = Dataset.from_dict({"prompt": [_PROMPT] * _STEPS})
    GRPOTrainer(model, reward, args=args, train_dataset=prompts, processing_class=byte_tokenizer()).train()
    return found


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_group_reads_its_prompt_once_and_a_step_makes_it_new(tmp_path: Path, bf16: bool, optimizer: str) -> None:
    settings = {"bf16": bf16, "optim": optimizer}
    plain = _train(tmp_path, attached=False, **settings)
    attached = _train(tmp_path, attached=True, **settings)
    length = len(_PROMPT)
    decoding = [(_GROUP, 1, length + number) for number in range(_NEW - 1)]
    assert plain.forwards == [(_GROUP, length, 0), *decoding] * _STEPS
    # The last token of the prompt is read for each sample. (The very first forward finds out about autocast.)
    group = [(1, length - 1, 0), (_GROUP, 1, length - 1), *decoding]
    assert attached.forwards == [(1, 1, 0), *group * _STEPS]
    assert attached.samples == plain.samples
    assert len(attached.digests) == _STEPS
