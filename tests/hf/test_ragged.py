from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvboost.errors import UnsupportedModelError
from kvboost.hf import ragged as ragged_module
from kvboost.hf.attention import registered
from kvboost.hf.cache import SlabCache
from kvboost.hf.probe import probe_model
from kvboost.hf.ragged import RaggedRunner, SharedPrefix, exchanged, gains_exchanged, probe_ragged
from kvboost.hf.rows import Row, RowBatch
from kvboost.hf.runner import ModelRunner
from kvboost.scheduler.jobs import Job, Sampler, sample_batch
from tests.helpers.kernels import with_flash_attention
from tests.helpers.models import FAMILIES

_TEXT = torch.randint(3, 97, (200,), generator=torch.Generator().manual_seed(3)).tolist()
_ONE_BY_ONE = {"gemma2"}  # soft-capped attention does not go through torch's kernel


def filled(runner: ModelRunner, tokens: list[int]) -> SlabCache:
    cache = SlabCache(probe_model(runner.model).layout, capacity=len(tokens) + 4)
    runner.append(tokens, cache, logits=False)
    return cache


def exchange_all(patch: pytest.MonkeyPatch, exchange: bool) -> None:
    """Whatever this machine is and however small the weights of a tiny model are."""
    patch.setattr(ragged_module, "_EXCHANGED_OUTPUTS", 1 if exchange else 10**9)
    patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    patch.setattr("torch.backends.mkl.is_available", lambda: True)


def joined(caches: list[SlabCache], *, tokens: int = 4) -> tuple[RowBatch, list[Row]]:
    """Copies of these caches as rows of a batch, with capacity for so many more tokens."""
    batch, rows = RowBatch(caches[0].layout), []
    for cache in caches:
        row = batch.add(tokens=cache.get_seq_length() + tokens)
        row.place(0, cache.span(0, cache.get_seq_length()))
        row.set_length(cache.get_seq_length())
        rows.append(row)
    return batch, rows


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - _ONE_BY_ONE))
def test_each_sequence_gets_what_it_would_get_alone(family: str, tiny: Callable[..., Any]) -> None:
    runner = ModelRunner(tiny(family))
    ragged = probe_ragged(runner, probe_model(runner.model).layout)
    prompts = [_TEXT[:40], _TEXT[50:53], _TEXT[60:120], [5]]  # within and beyond a window of 16
    alone = [filled(runner, prompt) for prompt in prompts]
    batch, joint = joined(alone)
    for step in range(3):
        tokens = [_TEXT[150 + step + i] for i in range(len(prompts))]
        found = ragged.decode(tokens, batch)
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
    prompts = [[*start, 7], [*start, 9, 11, 13]]
    alone = [filled(runner, prompt) for prompt in prompts]
    batch, joint = joined(alone)
    if family != "gemma3_text":  # a window looks at its own rows
        joint[1].wipe(0, 80)  # the others look at the first one's copy only
    found = ragged.decode([21, 22], batch, shared=[SharedPrefix((0, 1), 80)])
    expected = [runner.append([t], c, logits=True) for t, c in zip([21, 22], alone, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_what_not_all_of_a_group_share_is_attended_to_by_each(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.hf.ragged._MIN_SAVED", 1)
    runner = ModelRunner(tiny("llama"))
    alone = [filled(runner, prompt) for prompt in ([*_TEXT[:80], 7], [*_TEXT[:80], 9, 11, 13], _TEXT[90:180])]
    batch, _ = joined(alone)
    found = RaggedRunner(runner).decode([21, 22, 23], batch, shared=[SharedPrefix((0, 1), 80)])
    expected = [runner.append([t], c, logits=True) for t, c in zip([21, 22, 23], alone, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_sequences_of_other_capacities_are_groups_of_their_own(tiny: Callable[..., Any]) -> None:
    runner = ModelRunner(tiny("llama"))
    alone = [filled(runner, prompt) for prompt in (_TEXT[:40], _TEXT[:150], _TEXT[30:60], [*_TEXT, *_TEXT[:70]])]
    batch, rows = joined(alone, tokens=120)
    assert [(group.capacity, len(group.rows)) for group in batch.groups] == [(256, 2), (512, 2)]
    order = sorted(range(4), key=lambda index: rows[index].order)
    assert order == [0, 2, 1, 3]
    found = RaggedRunner(runner).decode([21 + index for index in order], batch)
    expected = [runner.append([21 + index], alone[index], logits=True) for index in order]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


class Counting(TorchDispatchMode):
    """Counts what torch is told to do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Notes where Python reads a tensor, for which it would have to wait for an accelerator."""

    READS = ("tolist", "item", "cpu", "numpy", "__int__", "__float__", "__bool__", "__index__", "nonzero", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.READS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("exchange", [False, True])
def test_the_calls_of_a_step_do_not_grow_with_its_sequences(
    family: str, exchange: bool, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange_all(monkeypatch, exchange)
    runner = ModelRunner(tiny(family))
    layers = runner.model.config.num_hidden_layers
    ragged = RaggedRunner(runner)
    counts: list[Counter[str]] = []
    for number in (12 if exchange else 2, 16):
        batch, _ = joined([filled(runner, _TEXT[i : 2 * i + 20]) for i in range(number)])
        samplers: list[Sampler | None] = [
            Sampler(Job(token_ids=(1,), max_new_tokens=4), device=runner.device) for _ in range(number)
        ]
        waits, counting = Waits(), Counting()
        with waits, counting:
            sample_batch(samplers, ragged.decode([5] * number, batch))
        assert waits.found == ["tolist"], "the tokens of the whole batch, once"
        counts.append(counting.calls)
    assert counts[0] == counts[1]
    attention = [count for name, count in counts[0].items() if "scaled_dot_product" in name]
    assert sum(attention) == layers, "one call in each layer"
    if family != "gpt2":  # which makes a tensor of a number of its own
        assert counts[0]["aten.lift_fresh.default"] == 1, "tokens and lengths are handed over once"


def test_a_sequence_has_the_bits_it_has_alone_where_the_kernels_allow_it(tiny: Callable[..., Any]) -> None:
    """In bfloat16 on CPUs neither the linear layers nor attention round by what other rows there are."""
    runner = ModelRunner(copy.deepcopy(tiny("llama")).to(torch.bfloat16))
    alone = [filled(runner, _TEXT[i : i + 5 + 11 * i]) for i in range(16)]
    together, _ = joined(alone)
    tokens = [_TEXT[100 + i] for i in range(16)]
    among = RaggedRunner(runner).decode(tokens, together)
    for index, cache in enumerate(alone):
        batch, _ = joined([cache])
        assert torch.equal(RaggedRunner(runner).decode([tokens[index]], batch)[0], among[index])


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_linear_layers_over_few_rows_are_exchanged(
    family: str, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(tiny(family))
    caches = [filled(runner, _TEXT[i : i + 9]) for i in range(12)]
    found: list[torch.Tensor] = []
    calls: list[int] = []
    monkeypatch.setattr(ragged_module, "exchanged", lambda *given: (calls.append(len(given[0])), exchanged(*given))[1])
    for pays in (False, True):
        exchange_all(monkeypatch, pays)
        ragged = RaggedRunner(runner)
        for count in (2, 12):
            batch, _ = joined(caches[:count])
            found.append(ragged.decode(_TEXT[:count], batch))
        linear = sum(type(module) is torch.nn.Linear for module in runner.model.modules())
        assert calls == [12] * linear * pays, "not in a step of two sequences"
    torch.testing.assert_close(found[3], found[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[2], found[0])


def test_the_shape_decides_what_is_exchanged_and_no_stopwatch(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts, beside a busy process and alone, must round alike."""
    assert [gains_exchanged(torch.empty(size, 64)) for size in (128, 192, 49152)] == [False, True, True]
    assert not gains_exchanged(torch.empty(192, 64, dtype=torch.bfloat16))
    exchange_all(monkeypatch, True)
    runner = ModelRunner(tiny("llama"))
    caches = [filled(runner, _TEXT[i : i + 9]) for i in range(12)]
    found: list[list[torch.Size]] = []
    monkeypatch.setattr(
        ragged_module, "exchanged", lambda *given: (found[-1].append(given[1].shape), exchanged(*given))[1]
    )
    for pause in (0.0, 1.0):  # by this clock every other of two ways takes a second more
        now = itertools.accumulate(itertools.cycle([0.1, 0.1 + pause, 0.1, 0.1]))
        monkeypatch.setattr("time.perf_counter", lambda now=now: next(now))
        found.append([])
        RaggedRunner(runner).decode(_TEXT[:12], joined(caches)[0])
    assert found[0]
    assert found[0] == found[1]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (16, 1, 7), (2, 3, 7), (1, 7)])
def test_an_exchanged_product_is_that_of_linear(shape: tuple[int, ...], biased: bool) -> None:
    made = torch.Generator().manual_seed(1)
    rows, weight, bias = (torch.randn(size, generator=made) for size in (shape, (11, 7), (11,)))
    given = bias if biased else None
    found = exchanged(rows, weight, given)
    torch.testing.assert_close(found, torch.nn.functional.linear(rows, weight, given))
    assert found.is_contiguous()
    assert found.shape == (*shape[:-1], 11)


def test_the_way_for_few_rows_is_probed(tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(tiny("llama"))
    layout = probe_model(runner.model).layout
    exchange_all(monkeypatch, True)
    probe_ragged(runner, layout)
    monkeypatch.setattr(ragged_module, "exchanged", lambda rows, weight, bias: exchanged(rows, weight, bias) + 0.1)
    with pytest.raises(UnsupportedModelError, match="decoded together"):
        probe_ragged(runner, layout)


def test_what_does_not_attend_through_the_kernel_is_refused(tiny: Callable[..., Any]) -> None:
    runner = ModelRunner(tiny("gemma2", attn_implementation="eager"))
    with pytest.raises(UnsupportedModelError, match="one after another"):
        probe_ragged(runner, probe_model(runner.model).layout)


def test_a_failed_step_leaves_the_caches_as_long_as_they_were(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(tiny("llama"))
    ragged = RaggedRunner(runner)
    batch, rows = joined([filled(runner, _TEXT[:9]), filled(runner, _TEXT[:5])])
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_batch", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            ragged.decode([1, 2], batch)
    assert [row.get_seq_length() for row in rows] == [9, 5]
    rows[1].set_length(rows[1].capacity)
    with pytest.raises(ValueError, match="capacity for one more"):
        ragged.decode([1, 2], batch)


def test_models_with_flash_attention_are_decoded_together_too(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = with_flash_attention(tiny("llama"), monkeypatch)
    before = registered("flash_attention_2")
    runner = ModelRunner(model)
    ragged = probe_ragged(runner, probe_model(model).layout)
    assert registered("flash_attention_2") == before, "the model is the same as before, and so is its key"
    alone = [filled(runner, prompt) for prompt in (_TEXT[:40], _TEXT[50:53])]
    assert calls, "alone the kernel runs"
    batch, _ = joined(alone)
    calls.clear()
    found = ragged.decode([7, 9], batch)
    assert not calls, "together the step's own attention does"
    expected = [runner.append([t], cache, logits=True) for t, cache in zip((7, 9), alone, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
