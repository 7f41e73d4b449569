"""Reuse of chunks that stand elsewhere, on tiny models: what is found, what it is worth, what it may not touch."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvboost import GenerationMode, KVBoost
from kvboost.approx.find import ApproxReuse
from kvboost.approx.select import STRATEGIES, Even
from kvboost.extend import RepairSituation
from tests.helpers.models import FAMILIES, tiny_model

pytestmark = pytest.mark.usefixtures("prices_as_guessed")

Tiny = Callable[..., Any]
MOVABLE = [name for name in FAMILIES if name != "gpt2"]


def text(seed: int, length: int) -> list[int]:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


HEAD, ONE, TWO, THREE, QUESTION = text(1, 40), text(2, 96), text(3, 120), text(4, 104), text(5, 20)


def joined(*parts: list[int]) -> tuple[list[int], list[int]]:
    """A prompt of these parts, and where each but the last ends."""
    tokens: list[int] = []
    ends: list[int] = []
    for part in parts:
        tokens += part
        ends.append(len(tokens))
    return tokens, ends[:-1]


def engine_for(model: Any, tokenizer: Any = None, **settings: Any) -> KVBoost:
    return KVBoost(model, tokenizer, **{"chunk_size": 32, "quality": "high", **settings})


def read(engine: KVBoost, *parts: list[int], **kwargs: Any) -> Any:
    tokens, ends = joined(*parts)
    return engine.prefill(tokens, boundaries=ends, **kwargs)


def warm(engine: KVBoost, *parts: list[int]) -> None:
    tokens, ends = joined(*parts)
    engine.warm(tokens, boundaries=[*ends, len(tokens)])


def repeated(engine: KVBoost, *parts: list[int], within: tuple[list[int], ...]) -> int:
    """Tokens behind the first part of a prompt that are in chunks of ``parts`` too."""
    assert engine.session is not None
    prefiller = engine.session.prefiller
    known = {chunk.tokens for chunk in prefiller.chunk(*joined(*parts, [])).chunks}
    chunks = prefiller.chunk(*joined(*within)).chunks
    count = sum(chunk.end - chunk.start for chunk in chunks if chunk.tokens in known and chunk.start >= len(parts[0]))
    if prefiller.rule.grid is None:  # else chunks end at its multiples too, wherever a text begins
        assert count == sum(map(len, parts[1:]))
    return count


def distance(one: Any, other: Any) -> float:
    return float((one.logits - other.logits).abs().max() / other.logits.abs().max())


@pytest.mark.parametrize("family", MOVABLE)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "none"])
def test_all_rows_repaired_equal_a_full_prefill(family: str, strategy: str, tiny: Tiny) -> None:
    model = tiny(family)
    engine = engine_for(model, recompute_strategy=strategy, recompute_ratio=1.0)
    full = read(engine_for(model, quality="exact"), HEAD, TWO, ONE, QUESTION)
    warm(engine, HEAD, ONE, TWO)
    found = read(engine, HEAD, TWO, ONE, QUESTION)
    assert found.reuse.moved_tokens == repeated(engine, HEAD, ONE, TWO, within=(HEAD, TWO, ONE, QUESTION))
    assert found.reuse.recomputed_tokens == found.reuse.moved_tokens
    assert not found.reuse.bitwise
    assert found.reuse.approximate == strategy
    assert distance(found, full) <= 3e-5
    end = len(HEAD + TWO + ONE + QUESTION)
    for one, other in zip(found.cache.extract(0, end), full.cache.extract(0, end), strict=True):
        assert (one - other).abs().max() <= 3e-5 * other.abs().max()


def test_only_chunks_that_a_request_used_are_hits(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny("llama"), recompute_ratio=1.0, force_approx=True, shadow_share=1.0)
    warm(engine, HEAD, ONE, TWO)
    tokens, ends = joined(HEAD, TWO, ONE, QUESTION)
    with monkeypatch.context() as failing:
        failing.setattr("kvboost.approx.repair.Repairer.repair", lambda *args: 1 // 0)
        with pytest.warns(RuntimeWarning, match="repositioning chunks failed"):
            assert read(engine, HEAD, text(7, 40), TWO, ONE, QUESTION).reuse.moved_tokens == 0
    assert engine.cache_stats()["approximate_hits"] == 0, "the repair failed, so the prompt was computed"
    before = engine.cache_stats()
    found = engine.generate(tokens, boundaries=ends, max_new_tokens=2)
    engine_chunks = engine.session.prefiller.chunk(tokens, ends).chunks
    moved = [chunk for chunk in engine_chunks if len(HEAD) <= chunk.start < len(HEAD + ONE + TWO)]
    assert found.reuse.moved_tokens == len(ONE + TWO)
    assert engine.parts.shadow is not None
    engine.parts.shadow.wait()
    assert engine.cache_stats()["approximate_hits"] == len(moved), "its check uses them again, and no request does"
    looked_up = [stats["cache_hits"] + stats["cache_misses"] for stats in (before, engine.cache_stats())]
    prompt = engine.session.prefiller.chunk(tokens, ends)
    assert looked_up[1] - looked_up[0] == len(prompt.lookup) - len(moved), "nor does a request look for them twice"
    engine.close()


@pytest.mark.parametrize("rounds", [1, 3])
def test_recomputed_tokens_do_not_count_as_cached(tiny: Tiny, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a repair goes over positions again, because the estimated error is too large."""
    if rounds > 1:
        monkeypatch.setattr("kvboost.approx.repair._Selector.remaining_error", lambda selector: math.inf)
    engine = engine_for(tiny("llama"), quality="fast", force_approx=True)
    warm(engine, HEAD, ONE, TWO)
    tokens, ends = joined(HEAD, TWO, ONE, QUESTION)
    result = engine.generate(tokens, boundaries=ends, max_new_tokens=1)
    reuse = result.reuse
    assert reuse.moved_tokens == len(ONE + TWO)
    computed = reuse.moved_tokens if rounds > 1 else round(0.15 * reuse.moved_tokens)
    assert reuse.recomputed_tokens == pytest.approx(computed, abs=2)
    assert result.cached_tokens == len(tokens) - reuse.fresh_tokens - reuse.recomputed_tokens
    assert result.kv_reuse_ratio == result.cached_tokens / len(tokens)
    told = Counter[str]()
    for kind, count in reuse.segments:
        told[kind] += count
    assert told["recomputed"] == pytest.approx(reuse.recomputed_tokens, abs=2)
    assert told["moved"] == reuse.moved_tokens - told["recomputed"]
    assert (told["exact"], told["fresh"]) == (reuse.exact_tokens, reuse.fresh_tokens)


def test_repair_brings_the_answer_closer(tiny: Tiny) -> None:
    model = tiny("llama", num_hidden_layers=4)
    full = read(engine_for(model, quality="exact"), HEAD, TWO, ONE, QUESTION)
    off: dict[float, float] = {}
    for ratio in (0.0, 0.5, 1.0):
        engine = engine_for(model, recompute_strategy="auto", recompute_ratio=ratio)
        warm(engine, HEAD, ONE, TWO)
        off[ratio] = distance(read(engine, HEAD, TWO, ONE, QUESTION), full)
    assert off[0.0] > off[0.5] > off[1.0]
    assert off[0.0] > 1e-2  # moved chunks are not what a full prefill computes: the report must not call them exact


def test_gaps_repeats_and_a_chunk_that_comes_first(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama", max_position_embeddings=1024), recompute_ratio=1.0, force_approx=True)
    full = engine_for(engine.model, quality="exact")
    warm(engine, HEAD, ONE, TWO)
    for parts in (
        (TWO, QUESTION),  # moved to position 0
        (HEAD, text(8, 50), TWO, QUESTION),  # a gap before it
        (HEAD, TWO, text(9, 50), ONE, QUESTION),  # a gap between
        (HEAD, ONE, TWO, TWO, ONE, TWO, QUESTION),  # exact, then the same several times
        (text(10, 7), ONE, QUESTION),  # behind a beginning of another length
    ):
        found = read(engine, *parts)
        exact = found.reuse.exact_tokens - (len(HEAD) if parts[0] is HEAD else 0)
        known = sum(len(part) for part in parts if part is ONE or part is TWO) - exact
        assert found.reuse.moved_tokens == known, [len(part) for part in parts]
        assert found.reuse.exact_tokens + known + found.reuse.fresh_tokens == sum(map(len, parts))
        assert exact == (len(ONE + TWO) if parts[:2] == (HEAD, ONE) else 0)
        assert distance(found, read(full, *parts)) <= 3e-5


def test_a_prompt_without_given_boundaries_finds_most_of_a_document(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama", max_position_embeddings=2048), chunk_size=16, recompute_ratio=0.1)
    document = text(11, 600)
    engine.warm(document)
    found = engine.prefill([*text(12, 33), *document, *QUESTION])
    assert found.reuse.moved_tokens >= 0.8 * len(document)


def test_mode_and_quality_decide_whether_chunks_move(tiny: Tiny) -> None:
    for quality, mode, moves in (
        ("high", GenerationMode.CHUNK_KV_REUSE, True),
        ("high", GenerationMode.PREFIX_CACHE, False),
        ("exact", GenerationMode.CHUNK_KV_REUSE, False),
        (0.0, GenerationMode.CHUNK_KV_REUSE, False),
        (0.05, GenerationMode.CHUNK_KV_REUSE, True),
    ):
        engine = engine_for(tiny("llama"), quality=quality)
        warm(engine, HEAD, ONE, TWO)
        reuse = read(engine, HEAD, TWO, ONE, QUESTION, mode=mode).reuse
        assert (reuse.moved_tokens > 0) is moves
        assert reuse.exact_tokens == len(HEAD)
        assert reuse.bitwise is not moves


@pytest.mark.parametrize("how", ["generate", "generate and keep the reply", "prefill", "batch"])
def test_nothing_behind_a_moved_chunk_is_found_as_exact(tiny: Tiny, how: str) -> None:
    """One poisoned prefix key would be wrong for ever. Fails if tainted rows are committed like others."""
    model = tiny("llama")
    # Batches know no boundaries: on a grid of eight all parts begin and end at a cut without them.
    grid = {"chunking": "fixed", "chunk_size": 8} if how == "batch" else {"chunk_size": 32}
    engine = KVBoost(model, quality="high", recompute_ratio=0.1, reuse_generated="keep" in how, **grid)
    tokens, ends = joined(HEAD, TWO, text(9, 64), ONE, QUESTION)
    warm(engine, HEAD, ONE, TWO)
    if how == "prefill":
        reuse = engine.prefill(tokens, boundaries=ends).reuse
    elif how == "batch":
        ends = []
        reuse = engine.generate_batch([tokens, text(77, 70)], max_new_tokens=4)[0].reuse
    else:
        reuse = engine.generate(tokens, boundaries=ends, max_new_tokens=40, min_new_tokens=40, temperature=0).reuse
    assert reuse.moved_tokens == len(ONE + TWO)
    again = engine.prefill(tokens, boundaries=ends, mode=GenerationMode.PREFIX_CACHE)
    assert again.reuse.exact_tokens == len(HEAD)
    fresh = KVBoost(model, quality="exact", **grid)
    assert torch.equal(again.logits, fresh.prefill(tokens, boundaries=ends).logits)


def test_text_read_behind_moved_chunks_is_kept_for_moving_only(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"), recompute_ratio=0.2)
    warm(engine, HEAD, ONE, TWO)
    before = engine.cache_stats()["hot_chunks"]
    read(engine, HEAD, TWO, THREE, ONE, QUESTION)  # THREE is new, and read behind TWO, which was moved
    assert engine.cache_stats()["hot_chunks"] > before
    assert read(engine, HEAD, THREE, QUESTION).reuse.moved_tokens == len(THREE)
    assert read(engine, HEAD, THREE, QUESTION, mode=GenerationMode.PREFIX_CACHE).reuse.exact_tokens == len(HEAD)


def test_what_follows_moved_chunks_runs_in_one_forward_and_is_kept(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"), recompute_ratio=0.0)
    warm(engine, HEAD, ONE, TWO)
    forwards: list[int] = []
    hook = engine.model.model.layers[0].register_forward_hook(lambda *_: forwards.append(1))
    read(engine, HEAD, TWO, ONE, THREE, QUESTION)  # THREE is of several chunks
    hook.remove()
    assert len(forwards) == 1
    assert read(engine, HEAD, THREE, QUESTION).reuse.moved_tokens == len(THREE)


def test_what_stands_before_the_first_moved_chunk_is_exact_and_kept(tiny: Tiny) -> None:
    model = tiny("llama")
    engine = engine_for(model, recompute_ratio=0.1)
    new = text(9, 64)
    warm(engine, HEAD, ONE)
    read(engine, HEAD, new, ONE, QUESTION)
    kept = read(engine, HEAD, new, QUESTION, mode=GenerationMode.PREFIX_CACHE)
    assert kept.reuse.exact_tokens == len(HEAD + new)
    assert kept.reuse.bitwise
    assert torch.equal(kept.logits, read(engine_for(model, quality="exact"), HEAD, new, QUESTION).logits)


def test_a_workspace_does_not_pass_moved_rows_on(tiny: Tiny) -> None:
    model = tiny("llama")
    engine = engine_for(model, recompute_ratio=0.0)
    warm(engine, HEAD, ONE, TWO)
    tokens, ends = joined(HEAD, TWO, ONE, QUESTION)
    engine.generate(tokens, boundaries=ends, max_new_tokens=2)  # its cache goes back to the pool
    # Now the exact chunks are stored too, computed in another and larger workspace: the first one must not claim them.
    engine.warm([*tokens, *text(77, 200)], boundaries=ends)
    again = engine.prefill(tokens, boundaries=ends, mode=GenerationMode.PREFIX_CACHE)
    assert torch.equal(again.logits, engine_for(model, quality="exact").prefill(tokens, boundaries=ends).logits)


def test_generate_stream_and_batch_move_too(tiny: Tiny) -> None:
    model = tiny("llama")
    tokens, ends = joined(HEAD, TWO, ONE, QUESTION)
    full = engine_for(model, quality="exact").generate(tokens, boundaries=ends, max_new_tokens=8, temperature=0)
    engine = engine_for(model, recompute_ratio=1.0)
    warm(engine, HEAD, ONE, TWO)
    one = engine.generate(tokens, boundaries=ends, max_new_tokens=8, temperature=0)
    assert one.token_ids == full.token_ids
    assert one.cached_tokens == len(HEAD)  # all that moved was recomputed
    assert one.reuse.moved_tokens == len(ONE + TWO)
    engine = engine_for(model, recompute_ratio=1.0)
    warm(engine, HEAD, ONE, TWO)
    *_, last = engine.stream(tokens, boundaries=ends, max_new_tokens=8, temperature=0)
    assert last.result is not None
    assert last.result.token_ids == full.token_ids
    assert last.result.reuse.approximate == one.reuse.approximate
    engine = engine_for(model, recompute_ratio=1.0, chunk_size=8, chunking="fixed")
    engine.warm([*HEAD, *ONE, *TWO])
    # 96 tokens of ONE keep the grid of eight: TWO and ONE change places
    batch = engine.generate_batch([[*HEAD, *TWO, *ONE, *QUESTION], [*HEAD, *QUESTION]], max_new_tokens=8, temperature=0)
    assert batch[0].reuse.moved_tokens == len(ONE + TWO)
    assert batch[0].token_ids == full.token_ids
    assert batch[1].reuse.bitwise


def test_a_model_without_rope_says_why_and_goes_on_exactly(tiny: Tiny) -> None:
    engine = engine_for(tiny("gpt2"))
    warm(engine, HEAD, ONE, TWO)
    reuse = read(engine, HEAD, TWO, ONE, QUESTION).reuse
    assert (reuse.exact_tokens, reuse.moved_tokens, reuse.bitwise) == (len(HEAD), 0, True)
    assert reuse.reason is not None
    assert "position" in reuse.reason


def test_where_computing_is_cheaper_nothing_moves(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny("llama"))
    warm(engine, HEAD, ONE, TWO)
    assert engine.parts is not None
    moving = engine.session.prefiller.approx
    assert isinstance(moving, ApproxReuse)
    assert read(engine, HEAD, ONE[:32], TWO, QUESTION).reuse.moved_tokens > 0
    for _ in range(200):  # a machine on which a forward costs much and a row nothing
        moving.costs.observe_prefill(forwards=1, tokens=100, seconds=1.0)
        moving.costs.observe_prefill(forwards=8, tokens=50, seconds=8.0)
        moving.costs.observe_repair(expected=1.0, seconds=1.0)
    declined = read(engine, HEAD, TWO, ONE, QUESTION).reuse  # two forwards instead of one
    assert declined.moved_tokens == 0
    assert declined.reason is not None
    assert "of the time to compute" in declined.reason


def test_what_runs_behind_a_repair_is_no_part_of_its_price(tiny: Tiny) -> None:
    """The price of a repair is learnt: expected to hold what follows it, repairs would soon seem to cost nothing."""
    engine = engine_for(tiny("llama"), recompute_strategy="none", recompute_ratio=0.0)
    warm(engine, HEAD, ONE, TWO)
    moving = engine.session.prefiller.approx
    assert isinstance(moving, ApproxReuse)
    moving.costs.observe_prefill(forwards=1, tokens=100, seconds=1.0)
    gap, behind = text(8, 24), text(9, 100)
    prompt = engine.session.prefiller.chunk(*joined(HEAD, TWO, gap, ONE, behind, QUESTION))
    spans, _ = moving.find(prompt.usable, available=2, prompt_tokens=len(prompt.tokens))
    assert spans is not None
    spans.lease.release()
    assert spans.expected_seconds == pytest.approx(moving.costs.prefill_seconds(forwards=1, tokens=len(gap)))


def test_little_found_in_much_text_is_computed(tiny: Tiny) -> None:
    """A repair is a forward more than computing everything: what it saves must be worth that."""
    engine = engine_for(tiny("llama"), recompute_strategy="none", recompute_ratio=0.0)
    warm(engine, HEAD, ONE)
    reuse = read(engine, HEAD, text(8, 32), ONE, text(9, 300), QUESTION).reuse
    assert reuse.moved_tokens == 0
    assert "of the time to compute the rest (limit 0.75)" in str(reuse)


def test_where_repositioning_is_slow_nothing_moves(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"))
    warm(engine, HEAD, ONE, TWO)
    moving = engine.session.prefiller.approx
    assert isinstance(moving, ApproxReuse)
    moving.costs.observe_reposition(tokens=1, seconds=100.0)
    refused = read(engine, HEAD, TWO, ONE, QUESTION).reuse
    assert refused.moved_tokens == 0
    assert f"{len(ONE + TWO)} tokens could be repositioned, at " in str(refused)
    assert "(limit 0.75); lower recompute_ratio (now 0.5)," in str(refused), "the threshold and the remedy"


def test_text_computed_before_a_moved_chunk_leaves_it_alone(tiny: Tiny) -> None:
    """Fails if chunks are placed before the steps in front of them, which clear the positions behind their own."""
    model = tiny("llama")
    engine = engine_for(model, recompute_ratio=0.0, recompute_strategy="none")
    warm(engine, HEAD, ONE)
    stored = read(engine_for(model, quality="exact"), HEAD, ONE, QUESTION).cache
    found = read(engine, HEAD, text(13, 8), ONE, QUESTION)
    assert found.reuse.moved_tokens == len(ONE)
    begin, end = len(HEAD), len(HEAD + ONE)
    for layer, before in zip(found.cache.layers, stored.layers, strict=True):  # values do not depend on the position
        assert torch.equal(layer.value_store[:, :, begin + 8 : end + 8], before.value_store[:, :, begin:end])


def test_the_best_variant_is_the_one_with_most_of_the_same_company(tiny: Tiny) -> None:
    """Encoded behind ONE, THREE is right behind ONE; the variant behind TWO would not be."""
    model = tiny("llama")
    engine = engine_for(model, recompute_ratio=0.0, recompute_strategy="none")
    warm(engine, HEAD, ONE, THREE)
    warm(engine, HEAD, TWO, THREE)
    full = engine_for(model, quality="exact")
    new = text(13, 8)
    by_company = read(engine, HEAD, new, ONE, THREE, QUESTION)
    reference = read(full, HEAD, new, ONE, THREE, QUESTION)
    other = engine_for(model, recompute_ratio=0.0, recompute_strategy="none")
    warm(other, HEAD, ONE)
    warm(other, HEAD, TWO, THREE)
    assert distance(by_company, reference) < distance(read(other, HEAD, new, ONE, THREE, QUESTION), reference)


_MODEL = tiny_model("llama", max_position_embeddings=4096)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_any_mix_of_known_and_new_parts_is_read_right(first: list[int], second: list[int]) -> None:
    """Whatever was read before, a prompt repaired whole equals a full prefill, and its parts add up."""
    parts = [text(20 + i, n) for i, n in enumerate((24, 40, 70, 33, 55))]
    engine = engine_for(_MODEL, recompute_ratio=1.0, chunk_size=16)
    warm(engine, *(parts[i] for i in first))
    prompt = [parts[i] for i in second]
    found, full = read(engine, *prompt, QUESTION), read(engine_for(_MODEL, quality="exact"), *prompt, QUESTION)
    reuse = found.reuse
    assert reuse.exact_tokens + reuse.moved_tokens + reuse.fresh_tokens == sum(map(len, prompt)) + len(QUESTION)
    assert reuse.bitwise is (reuse.moved_tokens == 0)
    assert distance(found, full) <= 3e-5


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "none"])
@pytest.mark.parametrize("rows_at_once", [2048, 16])
def test_what_a_workspace_held_before_cannot_be_seen(
    strategy: str, rows_at_once: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows not computed yet are masked, but nothing times a masked NaN is still NaN."""
    monkeypatch.setattr("kvboost.approx.recompute.MAX_POSITIONS", rows_at_once)
    engine = engine_for(tiny("llama"), recompute_strategy=strategy, recompute_ratio=0.3)
    assert engine.parts is not None
    warm(engine, HEAD, ONE, TWO)
    cache, _ = engine.session.prefiller.pool.take(tokens=500, chain=())
    for slab in cache.slabs:
        slab.fill_(float("nan"))
    engine.session.prefiller.pool.give_back(cache, held=())
    found = read(engine, HEAD, TWO, text(9, 70), ONE, text(10, 60), QUESTION)
    assert found.reuse.moved_tokens == len(ONE + TWO)
    assert found.cache is cache, "the test must run on the poisoned workspace"
    assert not found.logits.isnan().any()
    assert not any(rows.isnan().any() for rows in found.cache.extract(0, 406))


def test_a_prompt_that_comes_again_becomes_exact(tiny: Tiny) -> None:
    """Moved once; then computed, as it came again; from then on an exact hit."""
    model = tiny("llama")
    engine = engine_for(model, recompute_ratio=0.3)
    warm(engine, HEAD, ONE, TWO)
    new = text(9, 64)
    reuses = [read(engine, HEAD, TWO, new, ONE, QUESTION).reuse for _ in range(3)]
    assert [r.moved_tokens for r in reuses] == [len(ONE + TWO), 0, 0]
    assert [r.bitwise for r in reuses] == [False, True, True]
    assert reuses[2].exact_tokens == len(HEAD + TWO + new + ONE + QUESTION) - 1, "its end was stored too"
    # A prompt that only begins like it is exact as far as that goes, and moved behind.
    reuse = read(engine, HEAD, TWO, ONE, QUESTION).reuse
    assert (reuse.exact_tokens, reuse.moved_tokens) == (len(HEAD + TWO), len(ONE))


@pytest.mark.parametrize(
    "stage", ["kvboost.approx.reposition.KeyRepositioner.place", "kvboost.approx.repair.Repairer.repair"]
)
def test_a_failure_while_moving_is_computed_instead(stage: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    engine = engine_for(model, recompute_ratio=0.3)
    assert engine.parts is not None
    warm(engine, HEAD, ONE, TWO)

    def failing(*args: Any, **kwargs: Any) -> None:
        raise OSError("out of luck")

    monkeypatch.setattr(stage, failing)
    with pytest.warns(RuntimeWarning, match="out of luck"):
        found = read(engine, HEAD, text(9, 64), TWO, ONE, QUESTION)
    full = read(engine_for(model, quality="exact"), HEAD, text(9, 64), TWO, ONE, QUESTION)
    assert torch.equal(found.logits, full.logits)
    assert (found.reuse.moved_tokens, found.reuse.bitwise, found.reuse.approximate) == (0, True, None)
    assert found.reuse.reason is not None
    assert "out of luck" in found.reuse.reason
    assert engine._store.stats().leased == 0
    again = read(engine, HEAD, text(9, 64), TWO, ONE, QUESTION)
    assert again.reuse.exact_tokens == len(HEAD + text(9, 64) + TWO + ONE + QUESTION) - 1, "what was computed was kept"


def test_more_rows_are_computed_where_the_estimate_is_too_high(tiny: Tiny) -> None:
    model = tiny("llama", num_hidden_layers=6)
    full = read(engine_for(model, quality="exact"), HEAD, TWO, text(9, 64), ONE, QUESTION)
    rows: list[int] = []
    off: list[float] = []
    estimate = 0.0
    for rounds in (1, 2, 3):
        engine = engine_for(model, recompute_ratio=0.2)
        assert engine.parts is not None
        assert engine.session.prefiller.approx is not None
        # For two rounds: nine tenths of what the first one leaves, which the second must undercut.
        engine.session.prefiller.approx._repairers[0]._tolerated = {1: 1e9, 2: 0.9 * estimate, 3: 0.0}[rounds]
        warm(engine, HEAD, ONE, TWO)
        found = read(engine, HEAD, TWO, text(9, 64), ONE, QUESTION)
        assert found.reuse.error_estimate is not None
        estimate = found.reuse.error_estimate
        rows.append(found.reuse.recomputed_tokens)
        off.append(distance(found, full))
    moved = len(ONE + TWO)
    assert rows[0] == pytest.approx(0.2 * moved, abs=2)
    assert rows[1] == pytest.approx(0.4 * moved, abs=2)
    assert rows[2] == moved  # two rounds, then everything
    assert min(off[:2]) > 1e-2
    assert off[2] <= 3e-5
    assert estimate == 0.0


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ratio", [0.0, 0.004, 0.99])
def test_small_models_and_odd_ratios(layers: int, strategy: str, ratio: float, tiny: Tiny) -> None:
    engine = engine_for(tiny("llama", num_hidden_layers=layers), recompute_strategy=strategy, recompute_ratio=ratio)
    warm(engine, HEAD, ONE, TWO)
    for parts in ((HEAD, TWO, ONE, [7]), (HEAD, text(9, 64), TWO, text(7, 64), ONE, text(8, 50))):
        found = read(engine, *parts)
        assert found.reuse.reason is None, found.reuse.reason
        assert found.reuse.moved_tokens > 0
        assert not found.logits.isnan().any()


def test_beams_and_cancelled_streams_taint_nothing(tiny: Tiny) -> None:
    model = tiny("llama")
    engine = engine_for(model, recompute_ratio=0.2)
    warm(engine, HEAD, ONE, TWO)
    tokens, ends = joined(HEAD, TWO, text(9, 64), ONE, QUESTION)
    engine.generate(tokens, boundaries=ends, max_new_tokens=4, num_beams=2, temperature=0)
    other, other_ends = joined(HEAD, text(10, 64), TWO, ONE, QUESTION)
    stream = engine.stream(other, boundaries=other_ends, max_new_tokens=50)
    next(iter(stream))
    stream.close()
    assert engine._store.stats().leased == 0
    exact = engine_for(model, quality="exact")
    for prompt, boundaries in ((tokens, ends), (other, other_ends)):
        found = engine.prefill(prompt, boundaries=boundaries, mode=GenerationMode.PREFIX_CACHE)
        assert torch.equal(found.logits, exact.prefill(prompt, boundaries=boundaries).logits)


def test_where_half_is_not_enough_everything_is_computed(tiny: Tiny) -> None:
    """A second round would take all other rows, beside those computed wrongly, and call the result right."""
    model = tiny("llama", num_hidden_layers=6)
    full = read(engine_for(model, quality="exact"), HEAD, TWO, text(9, 64), ONE, QUESTION)
    engine = engine_for(model, recompute_ratio=0.6)
    assert engine.parts is not None
    assert engine.session.prefiller.approx is not None
    engine.session.prefiller.approx._repairers[0]._tolerated = 0.0
    warm(engine, HEAD, ONE, TWO)
    found = read(engine, HEAD, TWO, text(9, 64), ONE, QUESTION)
    assert found.reuse.error_estimate == 0.0
    assert distance(found, full) <= 3e-5


def test_what_was_cleared_may_be_moved_again(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"))
    for _ in range(2):
        warm(engine, HEAD, ONE, TWO)
        assert read(engine, HEAD, TWO, ONE, QUESTION).reuse.moved_tokens > 0
        engine.clear()


@pytest.mark.parametrize(
    "chosen", [torch.tensor([400]), torch.tensor([-1]), torch.ones(3, dtype=torch.bool), torch.tensor([0.5]), [1]]
)
def test_a_strategy_that_chooses_no_indices_is_named(tiny: Tiny, chosen: torch.Tensor) -> None:
    """Positions instead of indices, or a mask: the prompt is computed and the result says why."""

    @dataclass(frozen=True)
    class Wrong(Even):
        def choose(self, situation: RepairSituation) -> torch.Tensor:
            return chosen

    engine = engine_for(tiny("llama"), recompute_strategy=Wrong(), recompute_ratio=0.3)
    warm(engine, HEAD, ONE, TWO)
    with pytest.warns(RuntimeWarning, match="even"):
        found = read(engine, HEAD, TWO, ONE, QUESTION)
    assert found.reuse.moved_tokens == 0
    assert found.reuse.bitwise
    assert "ValueError" in str(found.reuse.reason)


@pytest.mark.parametrize("method", ["choose", "decision_layers", "attention_layers"])
def test_a_strategy_that_fails_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    @dataclass(frozen=True)
    class Mine(Even):
        name = "my own"

    def fail(self: Mine, asked: Any) -> Any:
        raise KeyError("text")

    monkeypatch.setattr(Mine, method, fail)
    engine = engine_for(tiny("llama"), recompute_strategy=Mine(), recompute_ratio=0.3)
    with warnings.catch_warnings(action="ignore"):  # of those that fail while a prompt is repaired
        warm(engine, HEAD, ONE, TWO)
        found = read(engine, HEAD, TWO, ONE, QUESTION)
    assert "my own failed: KeyError('text')" in str(found.reuse.reason)
    assert found.reuse.moved_tokens == 0
    assert found.reuse.bitwise
