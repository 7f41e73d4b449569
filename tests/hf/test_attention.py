"""Attention outside a step is sdpa; within one, the bits of a row depend on nothing but the keys up to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from kvboost import KVBoost
from kvboost.core.verify import same_bits
from kvboost.hf import attention as module
from kvboost.hf.attention import Call, Plan, Step, UnsupportedAttentionError, attending, attention
from kvboost.hf.cache import KVLayout, SlabCache, TensorSpec
from tests.helpers.models import tiny_model
from tests.helpers.mutations import mutated

_TOKENS, _DIM, _GRANULE = 640, 16, 512  # whole blocks of keys: other granules depend on the machine
_CAUSAL, _SLIDING = causal_mask_function, sliding_window_causal_mask_function(100)


def mask(q_length: int, kv_length: int, q_offset: int = 0, rule: Any = _CAUSAL) -> Any:
    """As Transformers asks for it."""
    asked = {"batch_size": 1, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": 0}
    return module.mask(**asked, mask_function=rule)


@dataclass(frozen=True)
class Layer:
    """One attention layer with what a model would give it, [1, heads, tokens, dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layer_idx: int = 0
    is_causal: bool = True

    @property
    def num_key_value_groups(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    def attend(self, start: int, end: int, allowed: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        """Of these positions: [1, tokens, heads, dim]."""
        key, value = self.key[:, :, :end], self.value[:, :, :end]
        return attention(self, self.query[:, :, start:end], key, value, allowed, scaling=0.3, **kwargs)[0]  # type: ignore[arg-type]

    def expected(self, rule: Any) -> torch.Tensor:
        """By the definition, in float64."""
        key, value = (x.double().repeat_interleave(self.num_key_value_groups, 1) for x in (self.key, self.value))
        hidden = ~sdpa_mask(1, _TOKENS, _TOKENS, mask_function=rule, allow_is_causal_skip=False)
        scores = (self.query.double() @ key.mT * 0.3).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2)


def layer(heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float32) -> Layer:
    """Of 32 keys each comes twice, with opposite values: what is left of the sums shows their order."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, n, _TOKENS, _DIM, generator=generator) for n in (*heads, heads[1]))
    for start in range(0, _TOKENS, 32):
        one, other = (start + torch.randperm(32, generator=generator)).view(2, 16)
        key[:, :, other], value[:, :, other] = key[:, :, one], -value[:, :, one]
    return Layer(query.to(dtype), key.to(dtype), value.to(dtype))


def dirty_cache(of: Layer) -> SlabCache:
    """An empty cache that holds NaN, as an earlier request may leave it."""
    spec = TensorSpec(of.key.shape[1], _DIM, of.key.dtype, of.key.device)
    cache = SlabCache(KVLayout((spec, spec)), capacity=_TOKENS)
    for slab in cache.slabs:
        slab.fill_(torch.nan)
    return cache


@contextmanager
def stepping(of: Layer, cache: SlabCache, end: int, *, wiped: bool = True) -> Iterator[Step]:
    """A step up to ``end``, with the cache as a model leaves it for attention."""
    start, padded = cache.get_seq_length(), -(-end // _GRANULE) * _GRANULE
    cache.reserve(padded)
    if wiped:
        cache.wipe(end, padded)
    cache.update(of.key[:, :, start:end], of.value[:, :, start:end], 0)
    step = Step(cache, start, padded, _GRANULE)
    with attending(step):
        yield step


def prefill(of: Layer, ends: list[int], rule: Any = _CAUSAL, *, wiped: bool = True) -> torch.Tensor:
    """Attention in steps that end here: [1, tokens, heads, dim]."""
    cache, parts, start = dirty_cache(of), [], 0
    for end in ends:
        with stepping(of, cache, end, wiped=wiped):
            parts.append(of.attend(start, end, mask(end - start, end, start, rule=rule)))
        start = end
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("rule", [_CAUSAL, _SLIDING], ids=["causal", "sliding"])
@pytest.mark.parametrize("start", [0, 40])
def test_outside_a_step_it_is_sdpa(start: int, rule: Any) -> None:
    of, rows = layer(), _TOKENS - start
    allowed = sdpa_mask(1, rows, _TOKENS, start, mask_function=rule)
    stock, _ = sdpa_attention_forward(of, of.query[:, :, start:], of.key, of.value, allowed, scaling=0.3)

    def is_sdpa() -> bool:
        made = mask(rows, _TOKENS, start, rule=rule)
        same = made is None if allowed is None else made is not None and torch.equal(made, allowed)
        return same and same_bits(of.attend(start, _TOKENS, made), stock)

    elsewhere: list[bool] = []
    assert is_sdpa()
    with stepping(of, dirty_cache(of), _TOKENS):
        thread = threading.Thread(target=lambda: elsewhere.append(is_sdpa()))
        thread.start()
        thread.join()
    assert elsewhere == [True]
    assert is_sdpa()


def test_what_somebody_else_registered_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", theirs)
    with attending(Plan()):
        assert AttentionInterface().get("sdpa") is theirs


def test_a_process_stores_what_its_first_request_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    with KVBoost(tiny_model("llama"), quality="exact") as engine:
        # As in a process whose engine need not measure anything.
        for interface, plain in ((AttentionInterface, sdpa_attention_forward), (AttentionMaskInterface, sdpa_mask)):
            monkeypatch.setitem(interface._global_mapping, module.NAME, plain)
        prompt = [(7 * i * i + i) % 61 for i in range(100)]
        engine.generate(prompt, max_new_tokens=1)
        assert AttentionInterface().get(module.NAME) is attention, "registered during the request"
        assert engine.generate(prompt, max_new_tokens=1).reuse.exact_tokens > 90


def test_somebodys_mask_stays_too_and_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs)
        return sdpa_mask(*args, **kwargs)

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, module.NAME, theirs)
    monkeypatch.setitem(AttentionInterface._global_mapping, module.NAME, sdpa_attention_forward)
    with attending(Plan()):
        assert AttentionMaskInterface().get(module.NAME) is theirs
        assert AttentionInterface().get(module.NAME) is sdpa_attention_forward


@pytest.mark.parametrize("change", ["eager", "mask", "attention"])
def test_an_attention_changed_after_the_first_batch_gives_the_answers_of_the_model(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    prompts = [[(7 * i * i + number * i + number) % 61 for i in range(40 + 9 * number)] for number in range(4)]
    with KVBoost(model, quality="exact") as engine:
        engine.generate_batch(prompts[:2], max_new_tokens=4, temperature=0)  # probes what may run together
        if change == "eager":
            model.set_attn_implementation("eager")
        elif change == "mask":
            theirs = partial(sdpa_mask)
            monkeypatch.setitem(AttentionMaskInterface._global_mapping, module.NAME, theirs)
        else:
            theirs = partial(sdpa_attention_forward)
            monkeypatch.setitem(AttentionInterface._global_mapping, module.NAME, theirs)
        with pytest.warns(RuntimeWarning, match="decoded one by one"):
            results = engine.generate_batch(prompts[2:], max_new_tokens=4, temperature=0)
        for result in results:
            plain = model.generate(torch.tensor([result.prompt_token_ids]), max_new_tokens=4, do_sample=False)
            assert list(result.token_ids) == plain[0, len(result.prompt_token_ids) :].tolist()
            again = engine.generate(list(result.prompt_token_ids), max_new_tokens=4, temperature=0)
            assert again.token_ids == result.token_ids


def test_arguments_may_be_given_by_position() -> None:
    query = torch.randn(1, 2, 4, 8)
    layer = torch.nn.Identity()
    layer.is_causal = False
    expected = sdpa_attention_forward(layer, query, query, query, None, 0.0, 0.5)[0]
    with attending(Plan()):
        assert torch.equal(attention(layer, query, query, query, None, 0.0, 0.5)[0], expected)
    assert torch.equal(attention(layer, query, query, query, None, 0.0, 0.5)[0], expected)
    by_name = sdpa_mask(batch_size=1, q_length=4, kv_length=4, q_offset=0, allow_is_causal_skip=False)
    with attending(Plan()):
        assert torch.equal(module.mask(1, 4, 4, q_offset=0, allow_is_causal_skip=False), by_name)
    assert torch.equal(module.mask(1, 4, 4, q_offset=0, allow_is_causal_skip=False), by_name)


def test_a_model_compiled_by_its_user_is_compiled_whole_and_follows_no_plan() -> None:
    """``fullgraph`` fails where dynamo meets what it cannot follow, such as a variable of the thread."""
    model = tiny_model("gemma3_text")
    ids = (torch.arange(40) * 7 % 97).view(1, -1)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    class Refusing(Plan):
        def attend(self, call: Call) -> torch.Tensor:
            raise AssertionError("a plan was followed")

    with attending(Plan()), torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad(), attending(Refusing()):
        found = compiled(input_ids=ids, use_cache=False).logits
    assert len(graphs) == 1
    assert same_bits(found, plain)


@pytest.mark.parametrize("rule", [_CAUSAL, _SLIDING], ids=["causal", "sliding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@given(cuts=st.sets(st.integers(1, _TOKENS - 1), max_size=4), end=st.integers(1, _TOKENS))
@example(cuts={1, 2, 300}, end=301)
@example(cuts={511, 513}, end=_TOKENS)
@settings(max_examples=15, deadline=None)
def test_any_steps_give_the_same_bits(
    heads: tuple[int, int], dtype: torch.dtype, rule: Any, cuts: set[int], end: int
) -> None:
    of = layer(heads, dtype)
    whole = prefill(of, [_TOKENS], rule)
    torch.testing.assert_close(whole.double(), of.expected(rule), rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
    assert same_bits(prefill(of, [*sorted(cut for cut in cuts if cut < end), end], rule), whole[:, :end])


def test_from_the_beginning_no_mask_is_made() -> None:
    of = layer()
    cache = dirty_cache(of)
    with stepping(of, cache, 40):
        assert mask(40, 40) is None
        assert mask(40, 40, rule=_SLIDING) is not None
    with stepping(of, cache, 90):
        later = mask(50, 90, 40)
    assert later is not None
    assert torch.equal(later[0, 0], torch.ones(50, 512, dtype=torch.bool).tril(40))
    with stepping(of, cache, 300):
        assert mask(210, 300, 90).numel() == 0, "a matrix that every head would read"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [96, 250, 1024])
@pytest.mark.parametrize("start", [1, 40, 511])
def test_calls_of_any_number_of_rows_give_the_same_bits(
    start: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = layer(dtype=dtype)
    whole = prefill(of, [_TOKENS])
    seen: list[tuple[int, int]] = []
    flash = module.flash

    def watched(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append((query.shape[2], key.shape[2]))
        return flash(query, key, *rest)

    monkeypatch.setattr(module, "flash", watched)
    monkeypatch.setattr(module, "_CALL_ROWS", rows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert same_bits(prefill(of, [start, _TOKENS]), whole)
    later = seen[1:]
    assert len(later) == -(-(_TOKENS - start) // rows)
    if start + rows <= 512:
        assert later[0] == (rows + -rows % 32, 512), "keys behind the last row of a call are not looked at"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_step_behind_a_prefix_has_the_bits_of_the_causal_kernel(dtype: torch.dtype) -> None:
    """In calls of the size they have: 1,024 rows, for which the kernel takes other blocks than for few."""
    generator = torch.Generator().manual_seed(2)
    tokens, start, dim = 2560, 300, 64
    query, key, value = (torch.randn(1, n, tokens, dim, generator=generator).to(dtype) for n in (4, 2, 2))
    whole = module.flash(query, key, value, None, 0.3)
    step = Step(None, start, tokens, _GRANULE)
    assert same_bits(module._after_prefix(step, query[:, :, start:], key, value, 0.3), whole[:, :, start:])


@pytest.mark.parametrize(("threads", "rows"), [(1, 1024), (4, 1024), (32, 8192)])
def test_a_call_has_work_for_every_thread(threads: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(module, "flash", lambda query, *_: (seen.append(query.shape[2]), query)[1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    query, keys = torch.zeros(1, 4, 8192, 1), torch.zeros(1, 4, 8704, 1)
    module._after_prefix(Step(None, 512, 8704, 512), query, keys, keys, None)
    assert max(seen) == rows
    assert sum(seen) == 8192


def test_a_model_that_changes_a_mask_that_only_stands_for_one_is_refused() -> None:
    of = layer()
    cache = dirty_cache(of)
    with stepping(of, cache, 40):
        pass
    with stepping(of, cache, 300):
        allowed = mask(260, 300, 40)
        with pytest.raises(UnsupportedAttentionError, match="changes its mask"):
            of.attend(40, 300, allowed[..., :300])


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
def test_two_masks_of_one_step_are_not_mixed_up(kept: bool) -> None:
    """Layers with a window and without alternate; a mask that is gone may leave its address to the next."""
    of, start, end = layer(), 300, 350
    cache, rules = dirty_cache(of), [_CAUSAL, _SLIDING] * 3
    expected = {rule: prefill(of, [start, end], rule)[:, start:] for rule in rules}
    assert not torch.equal(expected[_CAUSAL], expected[_SLIDING])
    with stepping(of, cache, start):
        pass
    with stepping(of, cache, end) as step:
        both = {rule: mask(end - start, end, start, rule=rule) for rule in rules}
        for rule in rules:
            allowed = both[rule] if kept else both[rule].clone()
            assert same_bits(of.attend(start, end, allowed), expected[rule])
            del allowed
        assert step.calls == len(rules)


@pytest.mark.parametrize("rule", [_CAUSAL, _SLIDING], ids=["causal", "sliding"])
@pytest.mark.parametrize("ends", [[40], [40, 90]])
def test_what_lies_behind_the_end_shows_only_if_it_is_not_wiped(ends: list[int], rule: Any) -> None:
    of = layer()
    assert prefill(of, ends, rule).isfinite().all()
    assert prefill(of, ends, rule, wiped=False).isnan().any()


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "head_mask"])
def test_attention_that_needs_more_than_a_mask_is_refused(name: str) -> None:
    of = layer()
    with stepping(of, dirty_cache(of), 40) as step:
        with pytest.raises(UnsupportedAttentionError, match=name):
            of.attend(0, 40, None, **{name: torch.ones(4)})
        assert step.calls == 0
        assert of.attend(0, 40, None, **{name: None}).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_mask_is_not_folded_and_gives_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, start, end = layer(dtype=dtype), 300, 345
    heads: list[int] = []
    results: list[torch.Tensor] = []
    flash = module.flash

    def watched(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        heads.append(query.shape[1])
        return flash(query, *rest)

    monkeypatch.setattr(module, "flash", watched)
    size = 2 * (end - start) * 512  # two heads for each KV head, and 345 keys are padded to 512
    for limit in (size, size - 1):
        monkeypatch.setattr(module, "_MAX_FOLDED", limit)
        results.append(prefill(of, [start, end]))
    assert heads == [4, 2, 4, 4]
    assert same_bits(*results)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("first + blocks\n", "first + blocks + 1\n"),
        ("first + blocks\n", "first + blocks - 1\n"),
        ("numbers[hidden:]", "numbers[len(numbers) :]"),
    ],
    ids=["a key too many", "a key too few", "no mask"],
)
def test_a_wrong_mask_of_many_rows_is_seen(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = layer()
    whole = prefill(of, [_TOKENS])
    assert same_bits(prefill(of, [40, _TOKENS]), whole)
    monkeypatch.setattr(module, "_after_prefix", mutated(module._after_prefix, right, wrong))
    assert not same_bits(prefill(of, [40, _TOKENS]), whole)
