"""Reads a prompt in steps into a paged cache and hands it to Transformers' own ``generate``.

For people who use the model without an engine. Invariant: nothing is sampled or stopped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvboost.errors import ConfigError
from kvboost.hf.cache import KVLayout
from kvboost.hf.generate import reads_prompt_again, run_generate, sequences_per_prompt
from kvboost.hf.runner import ModelRunner
from kvboost.hf.speculation import speculates
from kvboost.offload.kv.cache import PagedCache


def paged_generate(
    model: Any,
    tokens: Sequence[int],
    *,
    kv_bytes: int | str,
    block_tokens: int = 256,
    step_tokens: int = 512,
    directory: Path | str | None = None,
    layout: KVLayout | None = None,
    **arguments: Any,
) -> list[int]:
    """The tokens that ``model.generate`` puts behind ``tokens``, with the KV of all of them within ``kv_bytes``.

    The prompt is read ``step_tokens`` at a time; ``arguments`` are those of ``generate``.
    """
    if step_tokens < 1 or not tokens:
        raise ConfigError("paged_generate needs a prompt of one token at least and steps of one token at least")
    if reason := reads_prompt_again(model, arguments):
        raise ConfigError(f"{reason}; leave it out, or leave out kv_bytes")
    if speculates(model, arguments):
        raise ConfigError("a paged cache takes no rows back, as a draft would need; leave the draft out, or kv_bytes")
    if sequences_per_prompt(model, arguments) > 1:
        raise ConfigError("a paged cache holds one sequence: use no beams and no num_return_sequences")
    runner = ModelRunner(model)
    ids = torch.as_tensor(tokens, device=runner.device).view(1, -1)
    with (
        torch.no_grad(),
        PagedCache(model, kv_bytes=kv_bytes, block_tokens=block_tokens, directory=directory, layout=layout) as cache,
    ):
        for start in range(0, len(tokens) - 1, step_tokens):
            runner.run(ids[:, start : min(start + step_tokens, len(tokens) - 1)], cache, logits=False)
        decoded = run_generate(
            model,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            cache=cache,
            arguments=arguments,
            after_each_token=lambda: False,
            tokenizer=None,
        )
    new: list[int] = decoded.sequences[0, len(tokens) :].tolist()
    return new
