"""Scores: as plain Transformers' in float32, the same bits warm and cold, alone and beside others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvboost import ConfigError, KVBoost, Score
from kvboost.approx.find import ApproxReuse
from tests.helpers.models import FAMILIES, NEWEST
from tests.helpers.tokenizer import byte_tokenizer

Tiny = Callable[..., Any]


def text(seed: int, tokens: int) -> list[int]:
    return torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


CONTEXT = text(1, 90)
SINGLE = [[5], [6], [7], [8]]
LONGER = [text(2, 3), text(3, 9), text(4, 1), text(3, 9)[:5], text(5, 40)]


def plain(model: Any, context: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *continuation[:-1]]])).logits[0].float().log_softmax(dim=-1)
    rows = logits[len(context) - 1 :]
    ids = torch.tensor(continuation)
    return rows.gather(1, ids[:, None])[:, 0].tolist(), bool((rows.argmax(dim=-1) == ids).all())


def bits(scores: list[Score]) -> list[tuple[float, ...]]:
    return [score.logprobs for score in scores]


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_text", *(["mamba2"] if NEWEST else []), "deepseek_v32"])
def test_a_score_is_plain_transformers_own(family: str, tiny: Tiny) -> None:
    model = tiny(family)
    with KVBoost(model, chunk_size=16) as engine:
        for continuations in (SINGLE, LONGER):
            for score, tokens in zip(engine.score(CONTEXT, continuations), continuations, strict=True):
                logprobs, greedy = plain(model, CONTEXT, tokens)
                assert score.token_ids == tuple(tokens)
                assert score.logprobs == pytest.approx(logprobs, abs=1e-4)
                assert score.is_greedy == greedy
                assert score.logprob == pytest.approx(sum(logprobs), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "gpt2"])
def test_warm_and_cold_alone_and_together_have_the_same_bits(family: str, dtype: torch.dtype, tiny: Tiny) -> None:
    model = tiny(family, dtype=dtype)
    with KVBoost(model, chunk_size=16) as engine:
        cold = engine.score(CONTEXT, LONGER)
        assert cold[0].reuse.exact_tokens == 0
        warm = engine.score(CONTEXT, LONGER)
        assert warm[0].reuse.exact_tokens > 60
        alone = [engine.score(CONTEXT, [one])[0] for one in LONGER]
        engine.clear()
        engine.warm(CONTEXT[:40])
        partly = engine.score(CONTEXT, LONGER[::-1])[::-1]
    assert bits(cold) == bits(warm) == bits(alone) == bits(partly)


def test_the_greedy_answer_is_known_as_such(tiny: Tiny) -> None:
    with KVBoost(tiny("llama")) as engine:
        answer = list(engine.generate(CONTEXT, max_new_tokens=6, temperature=0, eos_token_id=None).token_ids)
        other = [*answer[:-1], (answer[-1] + 1) % 97]
        assert [score.is_greedy for score in engine.score(CONTEXT, [answer, other, answer[:1]])] == [True, False, True]


def test_ranks_and_the_likeliest_are_told_where_they_are_wanted(tiny: Tiny) -> None:
    model = tiny("llama")
    with KVBoost(model, chunk_size=16) as engine:
        plain_scores = engine.score(CONTEXT, LONGER)
        for count in (0, 3):
            for score, before, tokens in zip(
                engine.score_many([(CONTEXT, LONGER)], top_logprobs=count, progress=False)[0],
                plain_scores,
                LONGER,
                strict=True,
            ):
                assert score.logprobs == before.logprobs
                with torch.no_grad():
                    logits = model(torch.tensor([[*CONTEXT, *tokens[:-1]]])).logits[0, len(CONTEXT) - 1 :]
                rows = logits.float().log_softmax(dim=-1)
                assert list(score.ranks) == [
                    1 + int((row > row[id_]).sum()) for row, id_ in zip(rows, tokens, strict=True)
                ]
                assert [[id_ for id_, _ in top] for top in score.top] == rows.topk(count).indices.tolist()
                likeliest = [logprob for top in score.top for _, logprob in top]
                assert likeliest == pytest.approx(rows.topk(count).values.flatten().tolist(), abs=1e-4)
                assert score.ranks == before.ranks


def test_a_number_of_tokens_is_not_negative(tiny: Tiny) -> None:
    with KVBoost(tiny("llama")) as engine, pytest.raises(ConfigError, match="give 0 or more"):
        engine.score_many([(CONTEXT, SINGLE)], top_logprobs=-1)


def rows_read(model: Any, call: Callable[[], Any]) -> list[int]:
    """How many tokens each forward of this call computes."""
    read: list[int] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: read.append((args or [kwargs["input_ids"]])[0].numel()), with_kwargs=True
    )
    try:
        call()
    finally:
        hook.remove()
    return read


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "gpt2"])
def test_a_context_and_its_continuations_are_read_in_one_forward(family: str, tiny: Tiny) -> None:
    model, after = tiny(family), sum(len(tokens) - 1 for tokens in LONGER)
    with KVBoost(model, chunk_size=16) as engine:
        engine.score(text(9, 20), LONGER)
        assert rows_read(model, lambda: engine.score(CONTEXT, LONGER)) == [len(CONTEXT) + after]
        assert rows_read(model, lambda: engine.score(CONTEXT, LONGER)) == [1 + after]
        assert rows_read(model, lambda: engine.score(CONTEXT, SINGLE)) == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_score_stores_has_the_bits_of_a_prefill(dtype: torch.dtype, tiny: Tiny) -> None:
    model, longer = tiny("llama", dtype=dtype), CONTEXT + text(8, 12)
    with KVBoost(model, chunk_size=16) as engine:
        cold = engine.prefill(longer).logits
        engine.clear()
        engine.score(CONTEXT, LONGER)
        warm = engine.prefill(longer)
    assert warm.reuse.exact_tokens == len(CONTEXT)
    assert torch.equal(warm.logits, cold)


@pytest.mark.parametrize(("most", "rows"), [(60, [89, 1 + 2 + 8 + 4 + 39]), (120, [90 + 2 + 8 + 4, 1 + 39])])
def test_a_score_has_the_same_bits_in_several_forwards(
    most: int, rows: list[int], tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cold = tiny("llama"), list[Score]()
    with KVBoost(model, chunk_size=16) as engine:
        together = engine.score(CONTEXT, LONGER)
    monkeypatch.setattr("kvboost.hf.scoring._MAX_LOGITS", 97 * most)
    with KVBoost(model, chunk_size=16) as engine:
        engine.score(text(9, 20), SINGLE)
        assert rows_read(model, lambda: cold.extend(engine.score(CONTEXT, LONGER))) == rows
        warm = engine.score(CONTEXT, LONGER)
    assert bits(together) == bits(cold) == bits(warm)


def test_equal_contexts_are_read_once(tiny: Tiny) -> None:
    model = tiny("llama")
    with KVBoost(model, chunk_size=16) as engine:
        engine.score(text(9, 20), SINGLE)
        pairs = [(CONTEXT, LONGER[:2]), (text(9, 20), SINGLE), (CONTEXT, LONGER[2:])]
        found: list[list[Score]] = []
        read = rows_read(model, lambda: found.extend(engine.score_many(pairs, progress=False)))
        assert sum(read) == 1 + len(CONTEXT) + sum(len(tokens) - 1 for tokens in LONGER)
        assert bits([*found[0], *found[2]]) == bits(engine.score(CONTEXT, LONGER))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "gpt2"])
def test_several_contexts_in_one_forward_have_the_bits_they_have_alone(
    family: str, dtype: torch.dtype, tiny: Tiny
) -> None:
    model = tiny(family, dtype=dtype)
    contexts = [CONTEXT + text(seed, tokens) for seed, tokens in ((10, 3), (11, 30), (12, 1), (13, 17))]
    pairs = [*((context, LONGER[:2]) for context in contexts), (text(14, 40), LONGER), (text(15, 70), SINGLE)]
    with KVBoost(model, chunk_size=16) as engine:
        engine.score(text(9, 20), SINGLE)
        together: list[list[Score]] = []
        read = rows_read(model, lambda: together.extend(engine.score_many(pairs, progress=False)))
        warm = engine.score_many(pairs, progress=False)
        alone = []
        for pair in pairs:
            engine.clear()
            alone.append(engine.score(*pair))
    assert len(read) < len(pairs)
    assert sum(read) < 2 * len(CONTEXT) + sum(len(context) for context, _ in pairs)  # not four times
    assert [bits(scores) for scores in together] == [bits(scores) for scores in warm] == [bits(one) for one in alone]


def test_contexts_are_read_one_by_one_where_memory_has_room_for_one(tiny: Tiny) -> None:
    model = tiny("llama")
    pairs = [(text(seed, 60), SINGLE) for seed in range(20, 24)]
    with KVBoost(model, chunk_size=16) as engine:
        engine.score(text(9, 20), SINGLE)
        found: list[list[Score]] = []
        assert rows_read(model, lambda: found.extend(engine.score_many(pairs, progress=False))) == [4 * 60]
        needed = engine.session.budget.bytes_for(61)
    with KVBoost(model, chunk_size=16, kv_bytes=needed) as engine:
        engine.score(text(9, 20), SINGLE)
        few: list[list[Score]] = []
        assert rows_read(model, lambda: few.extend(engine.score_many(pairs, progress=False))) == [60] * 4
    assert [bits(scores) for scores in few] == [bits(scores) for scores in found]


def test_many_contexts_come_back_in_their_order_and_share_what_they_begin_with(tiny: Tiny) -> None:
    contexts = [CONTEXT + text(seed, 6) for seed in range(10, 14)]
    with KVBoost(tiny("llama"), chunk_size=16) as engine:
        found = engine.score_many([(context, SINGLE) for context in contexts], progress=False)
        assert sum(scores[0].reuse.exact_tokens > 60 for scores in found) == 3
        engine.clear()
        for context, scores in zip(contexts, found, strict=True):
            assert bits(engine.score(context, SINGLE)) == bits(scores)


def test_texts_are_cut_where_the_context_ends(tiny: Tiny) -> None:
    model = tiny("llama", vocab_size=260, max_position_embeddings=2048)
    with KVBoost(model, byte_tokenizer()) as engine:
        one, other = engine.score("What is it? ", ["a dog", "an owl"])
        ids = engine.encode("What is it? a dog")
        assert list(one.token_ids) == ids[len(engine.encode("What is it?")) :]
        logprobs, _ = plain(model, engine.encode("What is it?"), list(other.token_ids))
        assert other.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_a_long_continuation_is_scored_in_parts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.hf.scoring._MAX_LOGITS", 97 * 16)
    model = tiny("llama")
    with KVBoost(model, chunk_size=16) as engine:
        (score, short) = engine.score(CONTEXT, [text(6, 100), text(7, 3)])
        assert score.logprobs == pytest.approx(plain(model, CONTEXT, text(6, 100))[0], abs=1e-4)
        assert short.logprobs == pytest.approx(plain(model, CONTEXT, text(7, 3))[0], abs=1e-4)


def test_without_reuse_scores_are_the_same(tiny: Tiny) -> None:
    """Dynamic RoPE has other frequencies for texts this long, and those of the longest text so far."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = tiny("llama", rope_parameters=rope, max_position_embeddings=64)
    untouched = copy.deepcopy(model)
    with KVBoost(model) as engine:
        for context in (CONTEXT[:60], CONTEXT):  # the first one is short enough without what follows it
            for score, tokens in zip(engine.score(context, LONGER[:2]), LONGER, strict=False):
                assert score.logprobs == pytest.approx(plain(untouched, context, tokens)[0], abs=1e-4)
                assert "RoPE" in str(score.reuse.reason)


def test_approximate_kv_is_never_used(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    found = ApproxReuse.find
    monkeypatch.setattr(ApproxReuse, "find", lambda *args, **given: asked.append(1) or found(*args, **given))
    with KVBoost(tiny("llama"), quality="fast", chunk_size=16) as engine:
        engine.prefill(CONTEXT)
        assert asked == [1]
        engine.score(CONTEXT, SINGLE)
        assert asked == [1]


@pytest.mark.parametrize(
    ("context", "continuations", "said"),
    [
        ([], SINGLE, "at least one token"),
        (CONTEXT, [[]], "no tokens"),
        (CONTEXT, "text", "list of texts"),
        (CONTEXT, [3], "lists of token ids"),
        (None, SINGLE, "lists of token ids"),
    ],
)
def test_a_wrong_call_is_told_what_to_do(context: Any, continuations: Any, said: str, tiny: Tiny) -> None:
    with KVBoost(tiny("llama")) as engine, pytest.raises(ConfigError, match=said):
        engine.score(context, continuations)


@pytest.mark.parametrize("wrong", ["some text", (CONTEXT, SINGLE, 1), 7])
def test_an_entry_that_is_no_pair_is_told_by_its_number(wrong: Any, tiny: Tiny) -> None:
    with KVBoost(tiny("llama")) as engine, pytest.raises(ConfigError, match="entry 1 is not a pair"):
        engine.score_many([(CONTEXT, SINGLE), wrong])
