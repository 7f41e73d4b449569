"""Requests whose KV is more than ``kv_bytes``: the same answers from pages, reuse goes on, nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvboost.offload.kv.prefill as paged
from kvboost import GenerationMode, KVBoost
from kvboost.errors import CapacityError, ConfigError
from kvboost.offload.kv.cache import PagedCache, min_budget
from kvboost.scheduler.jobs import Job
from kvboost.scheduler.runner import BatchRunner
from kvboost.steps import StepRule
from kvboost.store import MemoryStore
from tests.helpers.models import tiny_model

_BUDGET = 64 * 1024  # of 256 bytes per token: 256 rows, in pages of 64
_PROMPT = [(i * 37 + i * i) % 90 + 3 for i in range(400)]
_SHORT = _PROMPT[:100]
_SETTINGS: dict[str, Any] = {"chunk_size": 16, "chunking": "fixed"}
_GREEDY: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0, "eos_token_id": None}
_MODEL = tiny_model("llama", max_position_embeddings=2048)


class _Watched(PagedCache):
    made: list[_Watched] = []  # emptied by the fixture

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.made.append(self)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_Watched]]:
    """The paged caches that the engine made."""
    monkeypatch.setattr(paged, "PagedCache", _Watched)
    _Watched.made.clear()
    yield _Watched.made
    for cache in _Watched.made:
        assert cache._pager.closed
        assert cache.ledger.used == 0
        assert cache.ledger.peak <= _BUDGET
    _Watched.made.clear()


def engine_of(budget: int | None = _BUDGET, model: Any = _MODEL, **settings: Any) -> KVBoost:
    return KVBoost(model, kv_bytes=budget, **{**_SETTINGS, **settings})


@pytest.fixture
def plain() -> Iterator[KVBoost]:
    with engine_of(None) as engine:
        yield engine


def test_a_long_prompt_gets_the_same_answer_from_pages(plain: KVBoost, caches: list[_Watched], tmp_path: Path) -> None:
    expected = plain.generate(_PROMPT, **_GREEDY)
    assert not expected.reuse.paged
    assert expected.reuse.bitwise
    with engine_of(kv_dir=tmp_path) as engine:
        result = engine.generate(_PROMPT, **_GREEDY)
        assert result.token_ids == expected.token_ids
        assert result.reuse.paged
        assert not result.reuse.bitwise
        assert "pages" in str(result.reuse.reason)
        (cache,) = caches
        assert cache.ledger.read_bytes > 0
        assert list(tmp_path.iterdir()) == []


def test_what_is_stored_goes_into_pages_and_what_is_new_is_stored(plain: KVBoost, caches: list[_Watched]) -> None:
    longer = [*_PROMPT, *_SHORT[::-1]]
    expected = plain.generate(longer, **_GREEDY).token_ids
    with engine_of() as engine:
        fitting = engine.generate(_SHORT, **_GREEDY)
        assert (fitting.reuse.paged, fitting.reuse.bitwise) == (False, True)
        for exact in (96, 496):  # the chunks of the short prompt; then also those that the first long one read
            result = engine.generate(longer, **_GREEDY)
            assert result.reuse.exact_tokens == exact
            assert result.reuse.fresh_tokens == 500 - exact
            assert result.reuse.tiers == {"memory": exact}
            assert result.token_ids == expected
            assert not result.reuse.bitwise
        assert len(caches) == 2


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_chunk_asked_for_under_two_names_counts_once(on_disk: bool, tmp_path: Path) -> None:
    with engine_of(disk_cache_dir=tmp_path if on_disk else None) as engine:
        counts = []
        for prompt in (_SHORT, _PROMPT, _PROMPT):  # 6 chunks and the end, then 18 behind the 6, then all 24
            engine.generate(prompt, **_GREEDY)
            stats = engine.cache_stats()
            counts.append((stats["cache_hits"], stats["cache_misses"]))
        assert counts == [(0, 7), (6, 25), (30, 25)]
    if on_disk:
        with engine_of(disk_cache_dir=tmp_path) as engine:
            assert engine.generate(_PROMPT, **_GREEDY).reuse.tiers == {"disk": 384}
            stats = engine.cache_stats()
            assert (stats["cache_hits"], stats["cache_misses"]) == (24, 0)


def test_a_prompt_that_fits_never_meets_rows_from_pages(plain: KVBoost) -> None:
    # Mapped as exact ones they would change its bits without a word.
    with engine_of(quality="exact") as engine:
        assert engine.generate(_PROMPT, **_GREEDY).reuse.paged
        first, again = engine.prefill(_SHORT), engine.prefill(_SHORT)
        assert (first.reuse.exact_tokens, again.reuse.exact_tokens) == (0, 99)
        expected = plain.prefill(_SHORT).logits
        for result in (first, again):
            assert result.reuse.bitwise
            assert torch.equal(result.logits, expected)
        # The exact chunks come first from now on, those read in pages behind them.
        assert engine.generate(_PROMPT, **_GREEDY).reuse.exact_tokens == 384


def test_the_end_of_a_prompt_in_pages_gets_no_exact_name() -> None:
    """Its chunks have names of their own; the tokens behind the last of them are not stored."""
    with engine_of() as engine:
        prefiller, tokens = engine.session.prefiller, [*_PROMPT, 5, 6, 7]
        assert engine.generate(tokens, **_GREEDY).reuse.paged
        tail = prefiller.chunk(tokens, ()).tail
        assert tail is not None
        assert prefiller.store.first_stored([tail]) is None


def test_stored_rows_are_those_of_the_pages() -> None:
    with engine_of() as engine:
        assert engine.warm(_PROMPT) == 25
        assert engine.warm(_PROMPT) == 0
        plain_rows = engine.parts.runner.prefill_plain(_PROMPT)[1]
        chunks = engine.session.prefiller.chunk(_PROMPT, ()).usable
        with engine._store.lease(paged._paged_names(chunks)) as lease:
            assert [block.bitwise for block in lease.blocks] == [False] * 24
            for chunk, block in zip(chunks, lease.blocks, strict=True):
                for layer, rows in enumerate(plain_rows.layers):
                    for slot, states in ((2 * layer, rows.keys), (2 * layer + 1, rows.values)):
                        expected = states[0, :, chunk.start : chunk.end]
                        torch.testing.assert_close(block.tensors[0][slot], expected, atol=1e-4, rtol=1e-4)


def test_chunks_on_disk_and_packed_ones_serve_pages(plain: KVBoost, tmp_path: Path) -> None:
    expected = plain.generate(_PROMPT, **_GREEDY).token_ids
    for attempt in range(2):
        with engine_of(disk_cache_dir=tmp_path / "raw") as engine:
            result = engine.generate(_PROMPT, **_GREEDY)
            assert result.token_ids == expected
            assert result.reuse.tiers == ({"disk": 384} if attempt else {})
    with engine_of(kv_cache_bits=8) as engine:
        engine.generate(_PROMPT, **_GREEDY)
        again = engine.generate(_PROMPT, **_GREEDY)
        assert again.reuse.exact_tokens == 384
        assert len(again.token_ids) == 24


def test_a_small_memory_store_caps_what_a_disk_brings(plain: KVBoost, tmp_path: Path) -> None:
    with engine_of(disk_cache_dir=tmp_path) as engine:
        engine.warm(_PROMPT)
    with engine_of(disk_cache_dir=tmp_path, cache_bytes=8 * 16 * 256) as engine:  # of 24 chunks
        result = engine.generate(_PROMPT, **_GREEDY)
        assert result.reuse.tiers == {"disk": 6 * 16}, "a quarter of it is for what waits to be written"
        assert result.token_ids == plain.generate(_PROMPT, **_GREEDY).token_ids
        assert engine._store.stats().leased == 0


def test_pieces_arrive_and_a_closed_stream_lets_go(plain: KVBoost, caches: list[_Watched]) -> None:
    expected = plain.generate(_PROMPT, **_GREEDY).token_ids
    with engine_of() as engine:
        ids: list[int] = []
        for piece in engine.stream(_PROMPT, **_GREEDY):
            ids.extend(piece.token_ids)
        assert tuple(ids) == expected
        stream = engine.stream(_PROMPT, **{**_GREEDY, "max_new_tokens": 1000})
        next(stream)
        stream.close()
        assert len(caches) == 2


def test_sampling_follows_the_seed(plain: KVBoost) -> None:
    answers = []
    with engine_of() as engine:
        for one in (plain, engine, engine):
            torch.manual_seed(5)
            answers.append(one.generate(_PROMPT, max_new_tokens=24, temperature=0.8, eos_token_id=None).token_ids)
    assert answers[0] == answers[1] == answers[2]


def test_an_error_lets_go_of_everything(
    caches: list[_Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "_RULE", StepRule(128, numerics="fast"))  # steps before the last one are stored

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("as planned")

    with engine_of(kv_dir=tmp_path) as engine:
        before = open_files()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="as planned"):
                engine.generate(_PROMPT, logits_processor=[fails], **_GREEDY)
        assert len(caches) == 3
        gc.collect()
        assert open_files() == before
        assert engine.cache_stats()["store_errors"] == 0
        assert engine._store.stats().leased == 0
        assert engine.generate(_PROMPT, **_GREEDY).reuse.exact_tokens == 384


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_store_that_fails_is_a_miss(plain: KVBoost) -> None:
    class Broken(MemoryStore):
        def lease(self, chunks: Any) -> Any:
            raise RuntimeError("broken")

    with engine_of(store=Broken(10**7)) as engine, pytest.warns(RuntimeWarning, match="broken"):
        result = engine.generate(_PROMPT, **_GREEDY)
    assert result.reuse.cached_tokens == 0
    assert result.token_ids == plain.generate(_PROMPT, **_GREEDY).token_ids


def test_a_batch_beyond_the_budget_runs_prompt_by_prompt(plain: KVBoost, caches: list[_Watched]) -> None:
    prompts = [_SHORT, _PROMPT, [*_SHORT, 5, 6]]
    expected = [plain.generate(prompt, **_GREEDY).token_ids for prompt in prompts]
    with engine_of() as engine:
        results = engine.generate_batch(prompts, **_GREEDY)
        assert [result.token_ids for result in results] == expected
        assert [result.reuse.paged for result in results] == [False, True, False]
        assert len(caches) == 1


def test_a_result_from_pages_carries_no_closed_cache(plain: KVBoost) -> None:
    for one, kept in ((plain, True), (engine_of(), False)):
        raw = one.generate(_PROMPT, return_dict_in_generate=True, **_GREEDY).raw
        assert (raw.past_key_values is not None) is kept
        assert ("past_key_values" in raw) is kept
        assert raw.sequences.shape == (1, 424)


def test_what_cannot_be_paged_is_refused() -> None:
    with engine_of() as engine:
        refused: list[Callable[[], Any]] = [
            lambda: engine.prefill(_PROMPT),
            lambda: engine.generate(_PROMPT, mode=GenerationMode.BASELINE, **_GREEDY),
            lambda: engine.generate(_PROMPT, num_beams=2, **_GREEDY),
            lambda: engine.generate(_SHORT, num_beams=4, **_GREEDY),
            lambda: engine.generate(_PROMPT, prompt_lookup_num_tokens=3, **_GREEDY),
        ]
        for call in refused:
            with pytest.raises(CapacityError, match="raise kv_bytes"):
                call()
        assert len(engine.generate(_SHORT, mode=GenerationMode.BASELINE, **_GREEDY).token_ids) == 24
        with BatchRunner(engine) as runner:
            with pytest.raises(CapacityError, match="raise kv_bytes"):
                runner.submit(Job(token_ids=tuple(_PROMPT), max_new_tokens=4))
            events = list(runner.submit(Job(token_ids=tuple(_SHORT), max_new_tokens=4)).events())
            assert len(events) == 5


def test_a_budget_or_a_model_that_cannot_work_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_bytes=1000 is too small .* give 16384 bytes or more"):
        engine_of(1000)
    with pytest.raises(ConfigError, match="kv_bytes='much' is not a size"):
        engine_of("much")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_dir=.* is no directory"):
        engine_of(kv_dir=tmp_path / "missing")
    with engine_of(model=tiny_model("llama", attn_implementation="eager")) as engine:
        assert not engine.generate(_PROMPT[:20], max_new_tokens=2).reuse.paged
        assert "more is refused" in engine.describe()["KV of a request"]
        with pytest.raises(CapacityError, match="cannot be paged .* raise kv_bytes"):
            engine.generate(_PROMPT, **_GREEDY)
    with engine_of(16384) as engine:
        assert engine.generate(_PROMPT, **_GREEDY).reuse.paged


def test_tenants_have_the_budget_and_nothing_of_each_other() -> None:
    with engine_of() as engine:
        view = engine.for_tenant("other")
        engine.warm(_PROMPT)
        result = view.generate(_PROMPT, **_GREEDY)
        assert result.reuse.paged
        assert result.reuse.exact_tokens == 0
        assert "65536 bytes" in engine.describe()["KV of a request"]


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
def test_other_families(family: str) -> None:
    model = tiny_model(family)
    expected = engine_of(None, model).generate(_PROMPT, **_GREEDY).token_ids
    with engine_of(model=model, quality="exact") as engine:
        for exact in (0, 384):
            result = engine.generate(_PROMPT, **_GREEDY)
            assert result.reuse.paged
            assert result.reuse.exact_tokens == exact
            assert result.token_ids == expected


@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_any_lengths_and_budgets(data: st.DataObject) -> None:
    layout = engine_layout()
    budget = data.draw(st.integers(min_budget(layout, 16), 100_000))
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=3))
    new = data.draw(st.integers(1, 20))
    arguments = {**_GREEDY, "max_new_tokens": new}
    with engine_of(None, quality="exact") as plain, engine_of(budget, quality="exact") as engine:
        for length in lengths:
            expected = plain.generate(_LONGEST[:length], **arguments)
            result = engine.generate(_LONGEST[:length], **arguments)
            assert result.token_ids == expected.token_ids
            assert result.reuse.paged or result.reuse.bitwise
            if layout.bytes_per_token * (length + new) > budget:
                assert result.reuse.paged


_LONGEST = [*_PROMPT, *_PROMPT[::-1]]


def engine_layout() -> Any:
    from kvboost.hf.probe import probe_model

    return probe_model(_MODEL).layout
