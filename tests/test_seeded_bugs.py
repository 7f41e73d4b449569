"""Bugs put in on purpose, each of which a named test must catch: the proof that those tests can fail."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kvboost import GenerationMode, KVBoost, UnsupportedModelError
from kvboost.core import keys as naming
from kvboost.core import prefill, state, states
from kvboost.core import workspaces as workspace
from kvboost.core.plan import ReusePlan, plan_reuse
from kvboost.hf import fingerprint, generate, peft_layers, ragged
from kvboost.hf.cache import SlabCache
from kvboost.hf.cache_layers import CountingLayer, SlabIndexedLayer, SlabLayer, StateLayer
from kvboost.hf.codec import KVCodec
from kvboost.hf.numerics import choose
from kvboost.hf.runner import ModelRunner
from kvboost.steps import StepRule
from kvboost.store import LeafFirstLRU, eviction
from kvboost.store.memory import MemoryStore
from kvboost.types import Chunk, Fingerprint
from tests import test_steps
from tests.core import test_keys as test_hashing
from tests.core import test_state
from tests.core import test_workspaces as test_workspace
from tests.engine import test_batch, test_engine, test_exact, test_states_alone
from tests.helpers.exactness import assert_warm_equals_cold
from tests.helpers.kernels import round_by_rows
from tests.helpers.models import tiny_model
from tests.hf import test_fingerprint as test_fp
from tests.hf import test_peft_layers
from tests.store.test_memory import TestMemoryStoreContract

Tiny = Callable[..., Any]


def _chain_ignores_parents(patch: pytest.MonkeyPatch) -> None:
    right = naming.chunk_keys

    def wrong(root: bytes, tokens: Any, ends: Sequence[int], **rest: Any) -> list[Chunk]:
        chunks = right(root, tokens, ends, **rest)
        parents = [None, *(c.content_key for c in chunks)]
        return [c._replace(prefix_key=c.content_key, parent_key=p) for c, p in zip(chunks, parents, strict=False)]

    patch.setattr(naming, "chunk_keys", wrong)


def _last_token_reused(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any) -> ReusePlan:
        return plan_reuse((), prompt_tokens=len(self.tokens), exact_tokens=self.hits.tokens)

    patch.setattr(state.PrefillState, "_exact_plan", wrong)


def _steps_without_tiles(patch: pytest.MonkeyPatch) -> None:
    round_by_rows(patch)
    patch.setattr(ModelRunner, "_step", lambda self, cache, tokens: nullcontext())


def _resumed_inside_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepRule, "resume", lambda self, position: position)


def _stored_tensors_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCodec, "pack", lambda self, tensors, start: tuple(tensors))


def _placed_one_row_late(patch: pytest.MonkeyPatch) -> None:
    right = SlabCache.place
    patch.setattr(SlabCache, "place", lambda self, start, tensors, row=0: right(self, start + 1, tensors, row=row))


def _mask_off_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlabLayer, "get_mask_sizes", lambda self, query_length: (self.length + query_length, 1))


def _padding_counted(patch: pytest.MonkeyPatch) -> None:
    right = ragged._GroupStep._bias

    def wrong(step: Any, *arguments: Any) -> tuple[int, torch.Tensor]:
        first, bias = right(step, *arguments)
        return first, torch.zeros_like(bias)

    patch.setattr(ragged._GroupStep, "_bias", wrong)
    patch.setattr(ragged, "compare_logits", lambda *args, **kwargs: None)  # which would refuse the model


def _leased_blocks_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryStore, "_evictable", lambda self, key: self._entries[key].successors == 0)


def _states_of_the_text_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateLayer, "forget", lambda self: None)


def _single_tokens_not_counted(patch: pytest.MonkeyPatch) -> None:
    right = CountingLayer.count
    patch.setattr(CountingLayer, "count", lambda self, tokens: right(self, tokens - (tokens == 1)))


def _prompt_read_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generate, "_resuming", lambda model, cache: nullcontext())


def _index_positions_from_zero(patch: pytest.MonkeyPatch) -> None:
    right = SlabIndexedLayer.indexer_position_ids.fget
    wrong = property(lambda self: None if (ids := right(self)) is None else 0 * ids, lambda self, ids: None)
    patch.setattr(SlabIndexedLayer, "indexer_position_ids", wrong)


def _states_leave_room_for_nothing(patch: pytest.MonkeyPatch) -> None:
    right = MemoryStore.__init__
    patch.setattr(
        MemoryStore, "__init__", lambda self, size, **rest: right(self, size, **{**rest, "states_alone": False})
    )


def _states_not_placed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlabCache, "place_states", lambda self, tensors: None)


def _states_shared_with_the_store(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: SlabCache, tensors: Sequence[torch.Tensor]) -> None:
        left = iter(tensors)
        for layer, specs in self.layout.states_by_layer.items():
            self.layers[layer].set_states([next(left)[None] for _ in specs])

    patch.setattr(SlabCache, "place_states", wrong)


def _state_named_by_its_end(patch: pytest.MonkeyPatch) -> None:
    right = prefill.state_chunk

    def wrong(behind: Chunk) -> Chunk:
        key = hashlib.sha256(str(behind.end).encode()).digest()
        return right(behind)._replace(prefix_key=key, content_key=key)

    for module in (prefill, states):
        patch.setattr(module, "state_chunk", wrong)


def _parents_evicted_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryStore, "_evictable", lambda self, key: self._entries[key].leases == 0)
    patch.setattr(eviction, "LeastExpected", LeafFirstLRU)  # which leaves leaves to the store


def _budget_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryStore, "_evict_for", lambda self, block, share: True)


def _fingerprint_without(field: str) -> Callable[[pytest.MonkeyPatch], None]:
    def seed(patch: pytest.MonkeyPatch) -> None:
        if field == "salt":  # no item: the others are hashed with it
            patch.setattr(hmac, "new", lambda salt, label, digest: hashlib.sha256(label))
        right = Fingerprint.items
        patch.setattr(Fingerprint, "items", lambda self: [item for item in right(self) if item[0] != field])

    return seed


def _workspace_claims_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(workspace, "_common", lambda held, chain: len(chain))


def _workspace_shared(patch: pytest.MonkeyPatch) -> None:
    right = workspace.WorkspacePool.take

    def wrong(self: Any, *, tokens: int, chain: Sequence[bytes]) -> Any:
        cache, in_place = right(self, tokens=tokens, chain=chain)
        self._shelf.idle.append(workspace._Idle(cache, tuple(chain), self))
        return cache, in_place

    patch.setattr(workspace.WorkspacePool, "take", wrong)


def _weights_not_watched(patch: pytest.MonkeyPatch) -> None:
    right = fingerprint.TensorWatch.states

    def without_versions(watch: Any, tensors: Sequence[torch.Tensor]) -> Any:
        return right(watch, tensors)._replace(versions=())

    patch.setattr(fingerprint.TensorWatch, "states", without_versions)


def _adapters_not_watched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fingerprint, "adapter_layers", lambda model, modules: ())


def _merges_not_watched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peft_layers._MergedAdapters, "note", lambda self: None)


def _change_during_request_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(naming.PromptKeys, "is_current", lambda self, snapshot: True)


def _given_cache_pooled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state.PrefillState, "detach", lambda self: self.cache)


def _taint_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = prefill.Prefiller._put
    patch.setattr(
        prefill.Prefiller,
        "_put",
        lambda self, state, chunk, *, context, bitwise: right(self, state, chunk, context=context, bitwise=True),
    )


def _cut_step_is_exact(patch: pytest.MonkeyPatch) -> None:
    right = state.PrefillState.computed

    def wrong(self: Any, end: int) -> None:
        right(self, end)
        self._num_exact = end

    patch.setattr(state.PrefillState, "computed", wrong)


# The tests that must fail, as plain functions.


def _hits_around_chunk_ends(tiny: Tiny) -> None:
    test_exact.test_hit_lengths_around_every_chunk_end("llama", 0, tiny)


def _same_chunk_after_other_text(tiny: Tiny) -> None:
    test_same_chunk_after_other_text_is_no_hit(tiny)


def _batch_rows(tiny: Tiny) -> None:
    test_batch.test_each_row_of_a_batch_is_its_own_prompt("llama", GenerationMode.PREFIX_CACHE, tiny)


def _own_cache(tiny: Tiny) -> None:
    test_engine.test_the_returned_cache_is_the_callers_own(_byte_engine())


def _decoded_rows(tiny: Tiny) -> None:
    test_engine.test_generated_rows_are_reused_only_on_request_and_never_called_bitwise(_byte_engine().model)


def _one_owner(tiny: Tiny) -> None:
    test_workspace.test_one_owner_at_a_time_and_never_over_budget()


def _many_steps(tiny: Tiny) -> None:
    test_exact.test_a_long_suffix_is_bit_identical(torch.bfloat16, tiny)


def _contract(name: str) -> Callable[[Tiny], None]:
    return lambda tiny: getattr(TestMemoryStoreContract(), name)()


def _recurrent_requests(tiny: Tiny) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "_GRID_ON_CPU", 16)
        warm, cold = (KVBoost(tiny("qwen3_5_text"), None, chunk_size=16, quality="exact") for _ in range(2))
        one, other = ([(i * factor) % 90 + 3 for i in range(70)] for factor in (7, 11))
        warm.warm(one)  # its cache is taken for the next prompt
        for tokens in (other, other, one, [*one, 5, 6], [*one, 7]):
            assert_warm_equals_cold(warm, cold, tokens)


def _short_steps(test: Callable[[Tiny], None]) -> Callable[[Tiny], None]:
    def check(tiny: Tiny) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choose, "_GRID_ON_CPU", 16)
            test(tiny)

    return check


_states_alone = _short_steps(test_states_alone.test_other_texts_of_one_length_are_told_apart)


def _byte_engine() -> KVBoost:
    from tests.helpers.tokenizer import byte_tokenizer

    return KVBoost(tiny_model("llama", vocab_size=260, max_position_embeddings=600), byte_tokenizer(), chunk_size=16)


_BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Tiny], None]]] = {
    "the last token is matched": (_last_token_reused, _hits_around_chunk_ends),
    "the chain forgets the parent": (_chain_ignores_parents, _same_chunk_after_other_text),
    "rows depend on their step": (_steps_without_tiles, _many_steps),
    "a prompt resumes inside a step": (
        _resumed_inside_a_step,
        lambda tiny: test_steps.test_on_a_grid_stored_steps_are_those_of_a_cold_run.hypothesis.inner_test(8, 13),
    ),
    "a stored tensor is shared with the caller": (_stored_tensors_shared, _own_cache),
    "KV is placed one row late": (_placed_one_row_late, _hits_around_chunk_ends),
    "the mask is off by one": (_mask_off_by_one, _hits_around_chunk_ends),
    "padding is attended to": (_padding_counted, _batch_rows),
    "a workspace claims rows it lacks": (_workspace_claims_everything, _same_chunk_after_other_text),
    "two requests share a workspace": (_workspace_shared, _one_owner),
    "decoded rows pass for exact ones": (_taint_forgotten, _decoded_rows),
    "a step in two parts passes for exact": (
        _cut_step_is_exact,
        lambda tiny: test_state.test_on_a_grid_a_second_advance_goes_on_inside_the_step(),
    ),
    "changed weights go unnoticed": (
        _weights_not_watched,
        lambda tiny: test_fp.test_weights_changed_in_place_end_the_old_hits(),
    ),
    "adapters share a cache": (_adapters_not_watched, lambda tiny: test_fp.test_adapters_have_their_own_cache()),
    "an undone merge is no change": (
        _merges_not_watched,
        lambda tiny: test_peft_layers.test_an_undone_merge_is_another_model(looked=False),
    ),
    "weights change during a request": (
        _change_during_request_ignored,
        lambda tiny: test_fp.test_weights_changed_during_a_request_store_nothing(),
    ),
    "the caller's cache is pooled": (
        _given_cache_pooled,
        lambda tiny: test_engine.test_a_cache_handed_out_with_the_result_is_the_callers(_byte_engine()),
    ),
    "states of the text before are not forgotten": (_states_of_the_text_before, _recurrent_requests),
    "states are not placed": (_states_not_placed, _recurrent_requests),
    "states alone are not placed": (_states_not_placed, _states_alone),
    "states alone are named by their end": (_state_named_by_its_end, _states_alone),
    "states alone share memory with the store": (_states_shared_with_the_store, _states_alone),
    "single tokens are not counted": (_single_tokens_not_counted, _states_alone),
    "generate reads the prompt again": (_prompt_read_again, _states_alone),
    "positions of index keys are lost": (
        _index_positions_from_zero,
        _short_steps(test_states_alone.test_indexed_attention_beside_states_is_resumed),
    ),
    "states alone leave room for KV": (
        _states_leave_room_for_nothing,
        _short_steps(test_states_alone.test_states_alone_fill_the_memory),
    ),
    "placed states are the stored ones": (_states_shared_with_the_store, _recurrent_requests),
    "a state is named by its end": (_state_named_by_its_end, _recurrent_requests),
    "a lease does not protect": (_leased_blocks_evicted, _contract("test_a_leased_block_is_not_evicted")),
    "a parent goes before its successor": (
        _parents_evicted_first,
        _contract("test_successors_are_evicted_before_what_they_follow"),
    ),
    "the byte budget is ignored": (_budget_forgotten, _contract("test_the_byte_budget_is_never_exceeded")),
} | {
    f"the fingerprint forgets {field}": (
        _fingerprint_without(field),
        lambda tiny, field=field: test_hashing.test_every_field_of_the_fingerprint_changes_every_key(field),
    )
    for field in Fingerprint.__dataclass_fields__
}


@pytest.mark.parametrize("bug", _BUGS)
def test_a_seeded_bug_is_caught(bug: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, check = _BUGS[bug]
    check(tiny)  # passes while the code is right
    with monkeypatch.context() as patch:
        seed(patch)
        # An assertion of the test, or a guard of the code's own: the plan's invariants, the probe.
        with pytest.raises((AssertionError, ValueError, UnsupportedModelError)):
            check(tiny)


def test_same_chunk_after_other_text_is_no_hit(tiny: Tiny) -> None:
    warm, cold = (KVBoost(tiny("llama"), None, chunk_size=8, chunking="fixed", quality="exact") for _ in range(2))
    one, other, shared = list(range(3, 11)), list(range(20, 28)), list(range(40, 64))
    warm.generate([*one, *shared], max_new_tokens=1, temperature=0)
    warm.warm([*other, *one])
    assert_warm_equals_cold(warm, cold, [*other, *shared], expected_hit=8)
    assert_warm_equals_cold(warm, cold, [*one, *shared], expected_hit=31)
    # A workspace that was used for another text in between holds none of this one.
    warm.generate([*other, *shared], max_new_tokens=1, temperature=0)
    result = warm.generate([*one, *shared], max_new_tokens=3, temperature=0, **_LOGITS)
    cold.clear()
    expected = cold.generate([*one, *shared], max_new_tokens=3, temperature=0, **_LOGITS)
    assert result.cached_tokens == 31
    assert all(torch.equal(a, b) for a, b in zip(result.raw.logits, expected.raw.logits, strict=True))


_LOGITS = {"return_dict_in_generate": True, "output_logits": True}
