from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteria

from kvboost import GenerationMode, KVBoost
from kvboost.hf.cache import SlabCache
from kvboost.hf.rows import RowBatch
from kvboost.scheduler.loop import JobLoop
from kvboost.scheduler.sequence import RunningJob
from tests.helpers.models import FAMILIES, tiny_model
from tests.helpers.tokenizer import byte_tokenizer

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


def test_a_shared_prefix_is_computed_once(tiny: Callable[..., Any]) -> None:
    engine = KVBoost(tiny("llama"), None, chunk_size=8, chunking="fixed")
    engine.generate_batch([[5], [6]], max_new_tokens=1)  # the first batch probes the model
    computed: list[int] = []
    embeddings = engine.model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda layer, ids, out: computed.append(ids[0].numel()))
    prompts = [[*_TEXT[:64], i] for i in range(3, 9)]
    results = engine.generate_batch(prompts, max_new_tokens=1, temperature=0)
    hook.remove()
    assert sum(computed) == 64 + 6, "six prompts, one reading of what they share"
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


def test_a_row_that_ended_by_a_stop_string_gains_no_end_token(tiny: Callable[..., Any]) -> None:
    """Where the padding is the end token, as Transformers chooses for models without one of their own."""
    engine = KVBoost(tiny("llama", vocab_size=260, max_position_embeddings=600), byte_tokenizer(), chunk_size=16)
    prompts = ["a", "some longer text than the other"]
    plain = {"max_new_tokens": 12, "do_sample": True, "temperature": 2.0}
    free = engine.generate_batch(prompts, **plain, **_seeded())
    stop = next(
        w for n in range(2, 9) if (w := free[0].output_text[n : n + 2]).isascii() and w not in free[1].output_text
    )
    unused = next(i for i in range(3, 260) if not any(i in row.token_ids for row in free))
    rows = engine.generate_batch(
        prompts, **plain, stop_strings=[stop], **{**_seeded(), "eos_token_id": unused, "pad_token_id": unused}
    )
    assert rows[0].output_text.endswith(stop)
    assert unused not in rows[0].token_ids, "an end token that it never made"
    assert rows[0].finish_reason == "stop"


def test_a_criterion_sees_one_prompt_at_a_time(tiny: Callable[..., Any]) -> None:
    class ThirdOfTheShort(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            assert len(input_ids) == 1
            return torch.tensor([input_ids.shape[1] == 20 + 3])

    engine = KVBoost(tiny("llama"), None, chunk_size=16, quality="exact")
    never = {"max_new_tokens": 8, "temperature": 0, "eos_token_id": 2, "pad_token_id": 2, "suppress_tokens": [2]}
    free = engine.generate_batch([_TEXT[:20], _TEXT[:30]], **never)
    rows = engine.generate_batch([_TEXT[:20], _TEXT[:30]], stopping_criteria=[ThirdOfTheShort()], **never)
    assert rows[0].token_ids == free[0].token_ids[:3]
    assert rows[0].finish_reason == "stop"
    assert rows[1].token_ids == free[1].token_ids


def test_a_batch_makes_no_capacity_that_nobody_may_use(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = KVBoost(tiny("llama", max_position_embeddings=8192), None, chunk_size=16, quality="exact")
    made: list[int] = []
    make, add = SlabCache.__init__, RowBatch.add

    def making(self: Any, layout: Any, *, capacity: int, batch: int = 1) -> None:
        made.append(capacity * batch)
        make(self, layout, capacity=capacity, batch=batch)

    def adding(self: Any, *, tokens: int, filled: int = 0) -> Any:
        made.append(tokens)
        return add(self, tokens=tokens, filled=filled)

    monkeypatch.setattr(SlabCache, "__init__", making)
    monkeypatch.setattr(RowBatch, "add", adding)
    found = engine.generate_batch([_TEXT[:20], _TEXT[:30]], max_new_tokens=8000, temperature=0, max_time=0.0)
    assert 30 + 256 <= max(made) < 1024, "a long answer grows the cache as it comes"
    assert [row.prompt_tokens for row in found] == [20, 30]


@pytest.mark.parametrize(
    ("arguments", "joint"),
    [
        ({"temperature": 0}, True),
        ({"do_sample": True, "top_k": 9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}, True),
        ({"temperature": 0, "bad_words_ids": [[5, 6]], "max_time": 1000.0}, True),
        ({"num_beams": 2}, False),
        ({"do_sample": True, "num_return_sequences": 2}, False),
        ({"temperature": 0, "return_dict_in_generate": True}, False),
        ({"temperature": 0, "logits_processor": LogitsProcessorList()}, False),
        ({"temperature": 0, "mode": GenerationMode.BASELINE}, False),
    ],
)
def test_what_only_transformers_loop_can_do_runs_one_by_one(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], joint: bool
) -> None:
    engine = KVBoost(tiny("llama"), None, chunk_size=16, quality="exact")
    ran: list[int] = []
    run = JobLoop.run
    monkeypatch.setattr(JobLoop, "run", lambda loop, jobs: (ran.append(len(jobs)), run(loop, jobs))[1])
    found = engine.generate_batch(_PROMPTS, max_new_tokens=4, **arguments)
    assert ran == ([len(_PROMPTS)] if joint else [])
    if not arguments.get("do_sample"):
        alone = [engine.generate(prompt, max_new_tokens=4, **arguments) for prompt in _PROMPTS]
        assert [(r.token_ids, r.finish_reason) for r in found] == [(r.token_ids, r.finish_reason) for r in alone]
        raw = [r.raw if isinstance(r.raw, torch.Tensor) else r.raw.sequences for r in (*found, *alone)]
        assert all(map(torch.equal, raw[: len(found)], raw[len(found) :]))


def test_a_batch_samples_the_same_from_the_same_state_of_torch(tiny: Callable[..., Any]) -> None:
    engine = KVBoost(tiny("llama"), None, chunk_size=16, quality="exact")
    rows = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        rows.append([r.token_ids for r in engine.generate_batch(_PROMPTS, max_new_tokens=8, temperature=2.0)])
    assert rows[0] == rows[1] != rows[2]


def test_a_function_of_allowed_tokens_is_given_the_number_of_its_prompt(tiny: Callable[..., Any]) -> None:
    engine = KVBoost(tiny("llama"), None, chunk_size=16, quality="exact")
    for more in ({}, {"num_beams": 2}):
        found = engine.generate_batch(
            _PROMPTS, prefix_allowed_tokens_fn=lambda number, ids: [40 + number], max_new_tokens=2, **more
        )
        assert [r.token_ids for r in found] == [(40 + number,) * 2 for number in range(len(_PROMPTS))]


def test_an_error_is_raised_and_everything_is_released(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = KVBoost(tiny("llama"), None, chunk_size=16, quality="exact")
    engine.generate_batch(_PROMPTS, max_new_tokens=2, temperature=0)
    with monkeypatch.context() as patched:
        patched.setattr(RunningJob, "fed", _failing)
        with pytest.raises(OSError, match="no more memory"):
            engine.generate_batch(_PROMPTS, max_new_tokens=2, temperature=0)
    assert engine._store.stats().leased == 0
    assert len(engine.generate_batch(_PROMPTS, max_new_tokens=2, temperature=0)) == len(_PROMPTS)


def _failing(job: RunningJob) -> None:
    raise OSError("no more memory")


def test_batches_are_checked_as_other_requests_are(tiny: Callable[..., Any]) -> None:
    engine = KVBoost(
        tiny("llama"), None, chunk_size=16, quality="high", shadow_share=1.0, force_approx=True, recompute_ratio=0.3
    )
    assert engine.parts.shadow is not None
    engine.warm(_TEXT[:64])
    prompts = [[7, 8, 9, *_TEXT[:64], last] for last in (3, 4)]
    results = engine.generate_batch(prompts, max_new_tokens=2, temperature=0)
    assert all(result.reuse.moved_tokens for result in results)
    engine.parts.shadow.wait()
    assert engine.cache_stats()["non_prefix_reuse"]["checked"] == 2
    engine.close()


def _seeded() -> dict[str, Any]:
    torch.manual_seed(5)
    return {"eos_token_id": None, "pad_token_id": 0}


def test_no_prompts(tiny: Callable[..., Any]) -> None:
    assert KVBoost(tiny("llama"), None).generate_batch([]) == []
