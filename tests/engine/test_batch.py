from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost import GenerationMode, KVBoost
from tests.helpers.models import FAMILIES

_TEXT = torch.randint(3, 97, (80,), generator=torch.Generator().manual_seed(7)).tolist()
_PROMPTS = [_TEXT[:60], _TEXT[:5], [*_TEXT[:40], 9, 9], [11], _TEXT[:48]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [GenerationMode.BASELINE, GenerationMode.PREFIX_CACHE])
def test_each_row_of_a_batch_is_its_own_prompt(family: str, mode: GenerationMode, tiny: Callable[..., Any]) -> None:
    engine = KVBoost(tiny(family), None, chunk_size=8, chunking="fixed")
    wanted = {"max_new_tokens": 8, "temperature": 0}
    alone = [engine.generate(p, mode=GenerationMode.BASELINE, **wanted).token_ids for p in _PROMPTS]
    together = engine.generate_batch(_PROMPTS, mode=mode, **wanted)
    assert [r.token_ids for r in together] == alone
    assert [r.prompt_tokens for r in together] == [len(p) for p in _PROMPTS]


def test_a_shared_prefix_is_computed_once(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = KVBoost(tiny("llama"), None, chunk_size=8, chunking="fixed")
    computed: list[int] = []
    append = engine.parts.runner.append
    monkeypatch.setattr(
        engine.parts.runner, "append", lambda t, *a, **k: (computed.append(len(t)), append(t, *a, **k))[1]
    )
    prompts = [[*_TEXT[:64], i] for i in range(3, 9)]
    results = engine.generate_batch(prompts, max_new_tokens=2, temperature=0)
    assert sum(computed) == 64, "six prompts, one reading of what they share"
    assert [r.cached_tokens for r in results] == [0, 64, 64, 64, 64, 64]


def test_rows_that_end_early_are_cut(tiny: Callable[..., Any]) -> None:
    engine = KVBoost(tiny("llama"), None, chunk_size=8)
    free = engine.generate_batch(_PROMPTS, max_new_tokens=8, temperature=0)
    end = free[0].token_ids[2]
    cut = engine.generate_batch(_PROMPTS, max_new_tokens=8, temperature=0, eos_token_id=end)
    for whole, short in zip(free, cut, strict=True):
        if end in whole.token_ids:
            assert short.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
            assert short.finish_reason == "stop"
        else:
            assert short.token_ids == whole.token_ids
            assert short.finish_reason == "length"


def test_rows_that_stop_at_a_string_carry_no_padding() -> None:
    from tests.helpers.models import tiny_model
    from tests.helpers.tokenizer import byte_tokenizer

    engine = KVBoost(tiny_model("llama", vocab_size=260), byte_tokenizer(), chunk_size=16)
    prompts = ["a", "some longer text than the other"]
    free = engine.generate_batch(prompts, max_new_tokens=12, do_sample=True, temperature=2.0, **_seeded())
    # A string that only one of the rows says, early on.
    stop = next(
        w for n in range(2, 9) if (w := free[0].output_text[n : n + 2]).isascii() and w not in free[1].output_text
    )
    rows = engine.generate_batch(
        prompts, max_new_tokens=12, do_sample=True, temperature=2.0, stop_strings=[stop], **_seeded()
    )
    assert rows[0].finish_reason == "stop"
    assert rows[0].output_text.endswith(stop)
    assert rows[0].token_ids == free[0].token_ids[: len(rows[0].token_ids)]
    assert len(rows[0].token_ids) < 12 == len(rows[1].token_ids)


def _seeded() -> dict[str, Any]:
    torch.manual_seed(5)
    return {"eos_token_id": None, "pad_token_id": 0}


def test_no_prompts(tiny: Callable[..., Any]) -> None:
    assert KVBoost(tiny("llama"), None).generate_batch([]) == []
