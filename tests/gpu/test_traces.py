"""What requests ask of a GPU, for Llama-3.1-8B at full size on fake CUDA tensors. Times are not measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

if torch.version.cuda is None:
    pytest.skip("needs torch's CUDA build: see .ci/gpu", allow_module_level=True)

from kvboost.hf.cache import SlabCache
from kvboost.hf.joint import JointPrefill
from kvboost.hf.ragged import RaggedRunner
from kvboost.hf.row_pages import has_kernel
from kvboost.hf.rows import RowBatch
from tests.helpers.fake_cuda import DEVICE, LLAMA_8B, FakeCuda, Trace

_PROMPT = list(range(3, 8195))  # 8,192 tokens
_LAYERS = LLAMA_8B["num_hidden_layers"]
_FLASH, _MASKED = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as found:
        yield found


def plain(cuda: FakeCuda, model: Any, tokens: int, *, cached: int = 0) -> Trace:
    """Transformers' own forward."""
    past = None
    if cached:
        past = model(torch.zeros(1, cached, dtype=torch.long, device=DEVICE), use_cache=True).past_key_values
    ids = torch.zeros(1, tokens, dtype=torch.long, device=DEVICE)
    return cuda.trace(lambda: model(ids, past_key_values=past, use_cache=True, logits_to_keep=1))


def forwards_of(model: Any) -> list[int]:
    """The rows of each forward from now on."""
    rows: list[int] = []
    model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return rows


def test_a_cold_prompt_takes_no_more_kernels_than_plain_transformers(cuda: FakeCuda) -> None:
    model = cuda.model()
    bare = plain(cuda, model, len(_PROMPT))
    rows = forwards_of(model)
    with cuda.engine(model) as engine:
        cold = cuda.trace(lambda: engine.prefill(_PROMPT))  # with its copies for the store
    assert len(rows) <= 2, rows
    assert cold.total <= 1.05 * bare.total
    assert cold.ops[_FLASH] == _LAYERS
    assert cold.peak_tensor <= bare.peak_tensor


def test_a_warm_prompt_has_one_attention_for_each_layer_and_repeats_no_keys(cuda: FakeCuda) -> None:
    model = cuda.model()
    with torch.no_grad():
        bare = plain(cuda, model, 100, cached=len(_PROMPT))
    with cuda.engine(model, workspace_bytes=0) as engine:
        engine.prefill(_PROMPT)
        warm = cuda.trace(lambda: engine.prefill([*_PROMPT, *range(9, 109)]))
        kv = engine.parts.layout.bytes_per_token * len(_PROMPT)  # type: ignore[union-attr]
    assert bare.ops[_MASKED] == _LAYERS, "what it would be without us"
    assert warm.ops[_FLASH] == _LAYERS
    assert warm.ops[_MASKED] == 0
    assert warm.total <= 1.05 * bare.total
    copied = warm.copied["cat"] + warm.copied["copy_"] + warm.copied["clone"]
    assert kv <= copied <= 1.1 * kv, "stored KV is copied once"


def test_steps_fit_a_small_card() -> None:
    with FakeCuda(memory=24 * 2**30, weights=16 * 2**30) as small:
        model = small.model()
        rows = forwards_of(model)
        with small.engine(model) as engine:
            engine.prefill(_PROMPT)
    assert 1 < len(rows) <= 3, "a card of 24 GB: an eighth of what the weights leave is for a step"


def test_eight_sequences_are_decoded_without_masks_and_without_copies_of_their_keys(cuda: FakeCuda) -> None:
    model = cuda.model()
    assert has_kernel(DEVICE)
    with torch.no_grad():
        past = model(torch.zeros(8, 3000, dtype=torch.long, device=DEVICE), use_cache=True, logits_to_keep=1)
        token = torch.zeros(8, 1, dtype=torch.long, device=DEVICE)
        bare = cuda.trace(lambda: model(token, past_key_values=past.past_key_values, use_cache=True))
    with cuda.engine(model) as engine:
        runner, layout = engine.parts.runner, engine.parts.layout
        assert layout is not None
        batch = RowBatch(layout)
        for length in range(2993, 3001):
            batch.add(tokens=3100).set_length(length)
        ragged = RaggedRunner(runner, in_pages=True)
        ragged.decode([5] * 8, batch)  # rows are cleared once
        joint = cuda.trace(lambda: ragged.decode([5] * 8, batch))
    assert joint.ops["_varlen_attn"] == _LAYERS
    assert joint.ops["index_put_"] == 2 * _LAYERS
    assert joint.ops[_MASKED] == joint.ops["bmm"] == 0
    assert joint.total <= 1.05 * bare.total
    assert joint.copied["cat"] < bare.copied["cat"] / 100, "plain Transformers copies all keys with every token"


def test_two_gpus(cuda: FakeCuda) -> None:
    model = cuda.split(cuda.model(num_hidden_layers=8))
    with torch.no_grad():
        bare = plain(cuda, model, 2048)
        suffix = plain(cuda, model, 100, cached=2048)
    with cuda.engine(model, workspace_bytes=0) as engine:
        layout = engine.parts.layout
        assert layout is not None
        assert {str(spec.device) for spec in layout.slots} == {"cuda:0", "cuda:1"}
        cold = cuda.trace(lambda: engine.prefill(_PROMPT[:2048]))
        warm = cuda.trace(lambda: engine.prefill([*_PROMPT[:2048], *range(9, 109)]))
    assert warm.ops[_FLASH] == cold.ops[_FLASH] == 8
    assert cold.total <= 1.05 * bare.total
    assert warm.total <= 1.05 * suffix.total


def test_prompts_that_come_together_share_a_forward(cuda: FakeCuda) -> None:
    model = cuda.model()
    bare = plain(cuda, model, 8 * 100)
    with cuda.engine(model) as engine:
        runner, layout = engine.parts.runner, engine.parts.layout
        assert layout is not None
        assert runner.joins
        caches = [SlabCache(layout, capacity=2100) for _ in range(8)]
        for cache in caches[:4]:
            cache.set_length(2000)
        joint = cuda.trace(lambda: JointPrefill(runner).append([_PROMPT[:100]] * 8, caches))
    assert joint.ops[_FLASH] == 8 * _LAYERS
    assert joint.ops[_MASKED] == 0
    assert joint.total - 8 * 3 * _LAYERS <= 1.05 * bare.total, "but for each one's attention, and where its KV is kept"
