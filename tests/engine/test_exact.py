"""Cold equals warm, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import seed as from_seed
from hypothesis.stateful import run_state_machine_as_test

from kvboost import KVBoost
from kvboost.hf.numerics import choose
from tests.helpers.exactness import ExactReuseMachine, assert_warm_equals_cold
from tests.helpers.models import FAMILIES, HYBRIDS

_CI = settings(
    max_examples=6, stateful_step_count=20, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def _run(model: Any, *, scale: int = 1) -> None:
    """Random requests until enough of them have reused something to prove something.

    What Hypothesis draws from one seed depends on the modules that are loaded, so a fixed number of examples holds
    enough on one machine and too few on the next. `python -m benchmarks exactness_families` makes 20,000 requests.
    """
    machine = type("Machine", (ExactReuseMachine,), {"model": model, "requests": 0, "hits": 0, "scale": scale})
    for start in range(5):
        run_state_machine_as_test(from_seed(start)(machine), settings=_CI)
        if machine.requests >= 40 and machine.hits >= 10:
            return
    raise AssertionError(f"only {machine.hits} of {machine.requests} requests reused anything")


_WIDE = {"hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_random_requests_are_bit_identical_to_cold_ones(
    family: str, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_GRID_ON_CPU", 16)  # these prompts are shorter than a step of the real grid
    _run(tiny(family))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_hit_lengths_around_every_chunk_end(family: str, offset: int, tiny: Callable[..., Any]) -> None:
    size = 8
    warm, cold = (KVBoost(tiny(family), None, chunk_size=size, chunking="fixed") for _ in range(2))
    text = torch.randint(3, 97, (6 * size + 2,), generator=torch.Generator().manual_seed(1)).tolist()
    warm.warm(text)
    for k in range(1, 7):
        length = k * size + offset
        # The last token always runs, so of a chunk that ends with the prompt all but one token is reused.
        hit = length - 1 if offset == 0 else (length - 1) // size * size
        assert_warm_equals_cold(warm, cold, text[:length], expected_hit=hit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_requests_on_a_wide_model(dtype: torch.dtype, tiny: Callable[..., Any]) -> None:
    """Wide enough that a step of another shape rounds differently: see the control below."""
    _run(tiny("llama", dtype=dtype, **_WIDE), scale=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_wide_model_shows_a_step_of_another_shape(dtype: torch.dtype, tiny: Callable[..., Any]) -> None:
    """The control: the same rows in a step of plain Transformers, which begins elsewhere, have other bits."""
    engine = KVBoost(tiny("llama", dtype=dtype, **_WIDE), None, chunk_size=32, chunking="fixed")
    same = 0
    for seed in range(6):
        text = torch.randint(3, 97, (300,), generator=torch.Generator().manual_seed(seed)).tolist()
        stepped, other = engine.prefill(text), engine.prefill(text)
        other.cache.crop(-204)
        with torch.no_grad():
            naive = engine.model(torch.tensor([text[96:]]), past_key_values=other.cache).logits[0, -1]
        same += torch.equal(naive, stepped.logits)
    assert same < 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_suffix_is_bit_identical(dtype: torch.dtype, tiny: Callable[..., Any]) -> None:
    """A long step behind a short hit: its rows must have the bits that they have in the cold run's one step."""
    warm, cold = (KVBoost(tiny("llama", dtype=dtype, **_WIDE), None, chunk_size=32, chunking="fixed") for _ in range(2))
    for seed in range(6):
        text = torch.randint(3, 97, (300,), generator=torch.Generator().manual_seed(seed)).tolist()
        warm.warm(text[:100])
        assert_warm_equals_cold(warm, cold, text, expected_hit=100)


@pytest.mark.real
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_model(dtype: torch.dtype, smollm2_path: str) -> None:
    """A short run; `python -m benchmarks exactness` does the 500 and 200 requests."""
    warm = KVBoost.from_pretrained(smollm2_path, dtype=dtype, chunk_size=32, chunking="fixed")
    cold = KVBoost(warm.model, warm.tokenizer, chunk_size=32, chunking="fixed")
    text = warm.tokenizer(torch.nn.Module.register_buffer.__doc__ * 2)["input_ids"]
    warm.warm(text[:200])
    for length in (31, 32, 33, 159, 160, 161, 230):
        hit = length - 1 if length % 32 == 0 else (length - 1) // 32 * 32
        if length > 200:
            hit = 200
        assert_warm_equals_cold(warm, cold, text[:length], expected_hit=hit)


def test_on_a_grid_a_prompt_that_fills_its_last_step_is_found_whole(tiny: Callable[..., Any]) -> None:
    engine = KVBoost(tiny("gemma2", max_position_embeddings=512), None, chunk_size=16, reuse_generated=True)
    text = torch.randint(3, 97, (300,), generator=torch.Generator().manual_seed(4)).tolist()
    for length in (128, 256):
        engine.clear()
        engine.prefill(text[:length])
        assert engine.prefill(text[: length + 9]).reuse.exact_tokens == length
    # A reply that crosses the grid is cut there, as the next prompt is.
    engine.clear()
    asked = text[:100]
    reply = engine.generate(asked, max_new_tokens=200, temperature=0, eos_token_id=None, pad_token_id=0).token_ids
    assert engine.prefill([*asked, *reply, 5]).reuse.exact_tokens == 256
