"""Models with recurrent layers: a hit ends where their states were kept, and is what a cold run computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.servers import RedisServer
from kvboost import CapacityError, KVBoost
from kvboost.capacity import workspace_capacity
from kvboost.hf.numerics import choose
from kvboost.scheduler.forwards import Forwards
from kvboost.store import MemoryStore
from kvboost.types import PutOutcome
from tests.helpers.exactness import assert_same_bits
from tests.helpers.models import HYBRIDS, NEWEST

Tiny = Callable[..., Any]
_GREEDY: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "eos_token_id": None}
_GRID = 16


def text(seed: int, tokens: int) -> list[int]:
    return torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_GRID_ON_CPU", _GRID)


def engine_for(model: Any, **settings: Any) -> KVBoost:
    return KVBoost(model, None, **{"chunk_size": 16, "quality": "exact", **settings})


def hit(engine: KVBoost, tokens: list[int], **given: Any) -> int:
    """How much of this prompt is reused. What is answered is held against a cold answer."""
    found = engine.prefill(tokens, **given)
    with engine_for(engine.model) as cold:
        assert_same_bits(found, cold.prefill(tokens), len(tokens))
    assert found.reuse.bitwise
    return found.reuse.exact_tokens


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_second_request_hits_and_the_answers_are_those_of_plain_transformers(family: str, tiny: Tiny) -> None:
    model, prompt = tiny(family), text(1, 70)
    with engine_for(model) as engine:
        assert hit(engine, prompt) == 0
        assert hit(engine, prompt) == 64
        assert hit(engine, prompt + text(2, 20)) == 64
        plain = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
        answer = engine.generate(prompt, **_GREEDY)
        assert answer.reuse.exact_tokens == 64
        assert list(answer.token_ids) == plain[0, len(prompt) :].tolist()
        assert engine.verify_correctness()


def test_a_growing_chat_hits_up_to_its_last_message(tiny: Tiny) -> None:
    with engine_for(tiny("qwen3_5_text")) as engine:
        chat: list[int] = []
        for turn in range(8):
            before = len(chat)
            chat = chat + text(turn, 50)
            assert engine.generate(chat, **_GREEDY).reuse.exact_tokens == before // _GRID * _GRID - (
                _GRID if before and before % _GRID == 0 else 0
            )
            assert hit(engine, chat) >= (len(chat) - 1) // _GRID * _GRID


def test_prompts_that_part_hit_from_the_second_branch_on(tiny: Tiny) -> None:
    """Nobody said where the system prompt ends: the first branch finds out."""
    with engine_for(tiny("qwen3_5_text")) as engine:
        system = text(1, 100)
        assert hit(engine, system + text(2, 60)) == 0
        assert hit(engine, system + text(3, 60)) == 0, "the KV is there, no state is"
        assert hit(engine, system + text(4, 60)) == 96
        assert hit(engine, system + text(5, 60)) == 96


def test_a_boundary_that_was_given_is_hit_by_the_second_prompt(tiny: Tiny) -> None:
    with engine_for(tiny("qwen3_5_text")) as engine:
        system = text(1, 100)
        assert hit(engine, system + text(2, 60), boundaries=[100]) == 0
        assert hit(engine, system + text(3, 60)) == 96


@pytest.mark.parametrize("numerics", ["bitwise", "fast"])
@pytest.mark.parametrize("family", ["qwen3_5_text", *(["mamba2"] if NEWEST else [])])
def test_a_prompt_that_ends_at_a_state_does_not_read_its_last_token_twice(
    family: str, numerics: str, tiny: Tiny
) -> None:
    """Its last token is computed, so the state behind it is one too far."""
    with engine_for(tiny(family), numerics=numerics) as engine, engine_for(engine.model, numerics=numerics) as cold:
        longer = text(1, 100)
        engine.prefill(longer, boundaries=[48, 64])
        for end, known in ((64, 48), (48, 0)):
            found = engine.prefill(longer[:end], boundaries=range(48, end + 1, 16))
            assert found.reuse.exact_tokens == known
            torch.testing.assert_close(found.logits, cold.prefill(longer[:end]).logits)
            cold.clear()


def test_without_a_grid_a_hit_ends_at_any_chunk(tiny: Tiny) -> None:
    with engine_for(tiny("qwen3_5_text"), numerics="fast") as engine:
        system = text(1, 100)
        engine.prefill(system + text(2, 61), boundaries=[100])
        found = engine.prefill(system + text(3, 61), boundaries=[100])
        assert found.reuse.exact_tokens == 100
        assert not found.reuse.bitwise
        with engine_for(engine.model, numerics="fast") as cold:
            torch.testing.assert_close(found.logits, cold.prefill(system + text(3, 61)).logits)


def test_what_has_gone_is_computed_from_an_earlier_state(tiny: Tiny) -> None:
    """A store may lose a block between saying that it has it and giving it."""
    with engine_for(tiny("qwen3_5_text")) as engine:
        prompt = text(1, 100)
        hit(engine, prompt, boundaries=[40])
        store = engine.session.store
        assert isinstance(store, MemoryStore)
        leases = store.lease

        def short(chunks: Any) -> Any:
            return leases(chunks[:4] if len(chunks) > 5 else chunks)

        store.lease = short  # type: ignore[method-assign]
        assert hit(engine, prompt) == 32
        assert store.stats().leased == 0


def test_states_stay_within_their_part_of_the_memory(tiny: Tiny) -> None:
    with engine_for(tiny("qwen3_5_text"), cache_bytes=200_000) as engine:
        store = engine.session.store
        assert isinstance(store, MemoryStore)
        held: list[float] = []
        for number in range(60):
            hit(engine, text(number, 100), boundaries=[20, 40, 60, 80])
            entries = [entry.block for entry in store._entries.values()]
            states = sum(block.nbytes for block in entries if not block.tokens)
            assert states <= max(store.stats().bytes / 3, 200_000 / 8)
            held.append(states)
        assert held[-1] > 0


def test_the_next_engine_goes_on_from_the_states_on_disk(tiny: Tiny, tmp_path: Path) -> None:
    model, prompt = tiny("qwen3_5_text"), text(1, 100)
    with engine_for(model, disk_cache_dir=tmp_path) as first:
        assert hit(first, prompt) == 0
    with engine_for(model, disk_cache_dir=tmp_path) as second:
        assert second.prefetch(prompt).result() == 96
        found = second.prefill(prompt)
        assert found.reuse.exact_tokens == 96
        with engine_for(model) as cold:
            assert_same_bits(found, cold.prefill(prompt), len(prompt))
    with engine_for(model, disk_cache_dir=tmp_path) as third:  # which loads them while the job waits
        assert third.generate_batch([prompt], **_GREEDY)[0].reuse.exact_tokens == 96


def test_another_machine_goes_on_from_the_states_on_a_server(tiny: Tiny, redis_at: RedisServer) -> None:
    model, prompt = tiny("nemotron_h"), text(1, 100)
    with engine_for(model, remote_url=redis_at.url, remote_timeout_seconds=30.0) as first:
        assert hit(first, prompt) == 0
        first.flush()
    with engine_for(model, remote_url=redis_at.url, remote_timeout_seconds=30.0) as second:
        assert hit(second, prompt) == 96


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "olmo_hybrid", "nemotron_h", "lfm2", *(["mamba2"] if NEWEST else [])]
)
def test_sequences_of_a_batch_are_decoded_together_from_states_of_their_own(family: str, tiny: Tiny) -> None:
    model = tiny(family)
    prompts = [text(1, 90) + text(number, 5 + 30 * number) for number in range(4)]
    with engine_for(model) as engine:
        alone = [engine.generate(prompt, **_GREEDY).token_ids for prompt in prompts]
        engine.clear()
        for expected_hit in (False, True):
            together = engine.generate_batch(prompts, **_GREEDY)
            assert [result.token_ids for result in together] == alone
            assert all(bool(result.reuse.exact_tokens) for result in together) or not expected_hit
        assert engine.parts.layout is not None
        assert Forwards.probe(engine.parts.runner, engine.parts.layout).single_reason is None


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
def test_beams_and_samples_have_states_of_their_own(settings: dict[str, Any], tiny: Tiny) -> None:
    model, prompt = tiny("qwen3_5_text"), text(1, 70)
    arguments = {"max_new_tokens": 6, "eos_token_id": None, "return_dict_in_generate": True, **settings}
    with engine_for(model) as engine:
        engine.warm(prompt)
        torch.manual_seed(3)
        found = engine.generate(prompt, **arguments)
        torch.manual_seed(3)
        plain = model.generate(torch.tensor([prompt]), **arguments)
        assert found.reuse.exact_tokens == 64
        assert torch.equal(found.raw.sequences, plain.sequences)


@pytest.mark.parametrize("family", ["qwen3_5_text", *(["mamba2"] if NEWEST else [])])
def test_a_prompt_of_one_token_begins_with_no_state(family: str, tiny: Tiny) -> None:
    """In the cache of an earlier prompt, whose states were of one sequence."""
    model = tiny(family)
    arguments: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 3, "eos_token_id": None}
    plain = model.generate(torch.tensor([[5]]), do_sample=False, **arguments)
    with engine_for(model) as engine:
        for _ in range(2):
            engine.warm(text(1, 40))
            assert list(engine.generate([5], **arguments).token_ids) == plain[0, 1:].tolist()
            whole = model(torch.tensor([[5, 6, 7]])).logits[0].log_softmax(dim=-1).detach()
            for score in engine.score([5], [[6, 7], [6, 7]]):
                assert score.logprobs == pytest.approx([float(whole[0, 6]), float(whole[1, 7])], abs=1e-4)


def test_what_cannot_be_done_is_refused_with_the_reason(tiny: Tiny) -> None:
    model = tiny("qwen3_5_text")
    with engine_for(model, quality="fast") as engine:
        assert "a recurrent state holds all that came before it" in engine.describe()["non-prefix reuse"]
    for family in ("falcon_h1", "qwen3_5_text"):
        with (
            engine_for(tiny(family), kv_bytes=100_000) as engine,
            pytest.raises(CapacityError, match="keep a state, which goes into no page"),
        ):
            engine.generate(text(1, 450), **_GREEDY)
    with engine_for(model) as engine:
        assert engine.describe()["recurrent state"].startswith(str(engine.parts.layout.state_bytes))  # type: ignore[union-attr]


def test_memory_counts_states(tiny: Tiny) -> None:
    with engine_for(tiny("qwen3_5_text")) as engine:
        layout = engine.parts.layout
        assert layout is not None
        small, large = (engine.estimate_memory(context=100, batch=batch, stored_tokens=0) for batch in (1, 3))
        assert large.kv - small.kv == 2 * (100 * layout.bytes_per_token + layout.state_bytes)
        reserved = engine.session.prefiller.pool.bytes_for(100)
        assert reserved == workspace_capacity(100) * layout.bytes_per_token + layout.state_bytes
        assert engine.session.prefiller.pool.make(tokens=100).nbytes == reserved


def test_a_state_needs_the_kv_before_it(tiny: Tiny) -> None:
    with engine_for(tiny("qwen3_5_text")) as engine, engine_for(tiny("qwen3_5_text")) as other:
        hit(engine, text(1, 100))
        store, elsewhere = engine.session.store, other.session.store
        assert isinstance(store, MemoryStore)
        (state,) = [entry.block for entry in store._entries.values() if not entry.block.tokens]
        assert elsewhere.put(state) is PutOutcome.REFUSED
