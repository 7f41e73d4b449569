from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost.errors import UnsupportedModelError
from kvboost.hf.cache import SlabCache
from kvboost.hf.probe import probe_model
from kvboost.hf.ragged import RaggedRunner, SharedPrefix, probe_ragged
from kvboost.hf.runner import ModelRunner
from tests.helpers.models import FAMILIES

_TEXT = torch.randint(3, 97, (200,), generator=torch.Generator().manual_seed(3)).tolist()
_ONE_BY_ONE = {"gemma2"}  # soft-capped attention does not go through torch's kernel


def filled(runner: ModelRunner, tokens: list[int]) -> SlabCache:
    cache = SlabCache(probe_model(runner.model).layout, capacity=len(tokens) + 4)
    runner.append(tokens, cache, logits=False)
    return cache


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - _ONE_BY_ONE))
def test_each_sequence_gets_what_it_would_get_alone(family: str, tiny: Callable[..., Any]) -> None:
    runner = ModelRunner(tiny(family))
    ragged = probe_ragged(runner, probe_model(runner.model).layout)
    prompts = [_TEXT[:40], _TEXT[50:53], _TEXT[60:120], [5]]  # within and beyond a window of 16
    joint, alone = ([filled(runner, prompt) for prompt in prompts] for _ in range(2))
    for step in range(3):
        tokens = [_TEXT[150 + step + i] for i in range(len(prompts))]
        found = ragged.decode(tokens, joint)
        expected = [runner.append([t], cache, logits=True) for t, cache in zip(tokens, alone, strict=True)]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(joint, alone, strict=True):
        assert mine.get_seq_length() == theirs.get_seq_length()
        for a, b in zip(mine.span(0, mine.get_seq_length()), theirs.span(0, mine.get_seq_length()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_shared_beginning_is_attended_to_once(
    family: str, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.hf.ragged._MIN_SAVED", 1)
    runner = ModelRunner(tiny(family))
    ragged = RaggedRunner(runner)
    start = _TEXT[:80]
    prompts = [[*start, 7], [*start, 9, 11, 13], [5, 6], [*start[:70], 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 8]]
    joint, alone = ([filled(runner, prompt) for prompt in prompts] for _ in range(2))
    if family != "gemma3_text":  # a window looks at its own rows
        joint[1].wipe(0, 80)  # the others look at the first one's copy only
    shared = [SharedPrefix((0, 1), 80)]
    found = ragged.decode([21, 22, 23, 24], joint, shared=shared)
    expected = [runner.append([t], c, logits=True) for t, c in zip([21, 22, 23, 24], alone, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_what_does_not_attend_through_the_kernel_is_refused(tiny: Callable[..., Any]) -> None:
    runner = ModelRunner(tiny("gemma2", attn_implementation="eager"))
    with pytest.raises(UnsupportedModelError, match="one after another"):
        probe_ragged(runner, probe_model(runner.model).layout)


def test_a_failed_step_leaves_the_caches_as_long_as_they_were(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(tiny("llama"))
    ragged = RaggedRunner(runner)
    caches = [filled(runner, _TEXT[:9]), filled(runner, _TEXT[:5])]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_batch", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            ragged.decode([1, 2], caches)
    assert [cache.get_seq_length() for cache in caches] == [9, 5]
    full = SlabCache(caches[0].layout, capacity=4)
    full.set_length(full.capacity)
    with pytest.raises(ValueError, match="capacity for one more token"):
        ragged.decode([1], [full])
