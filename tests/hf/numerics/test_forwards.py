from __future__ import annotations

import copy
import inspect
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvboost.core.verify import same_bits
from kvboost.hf.cache import SlabCache
from kvboost.hf.numerics import forwards
from kvboost.hf.numerics.forwards import functions_of, missing, replaced, set_on
from kvboost.hf.numerics.tiles import Tiles
from kvboost.hf.probe import probe_model
from tests.helpers.models import tiny_model


class Module(torch.nn.Module):
    def forward(self, x: float) -> float:
        return x + 1


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Of threads: with the usual interval a short block runs without one."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_a_thread(run: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    return results[0]


def test_a_module_has_another_forward_in_this_thread_alone() -> None:
    module = Module()
    with replaced([(module, lambda x: x * 10)]):
        assert module(3) == 30
        assert in_a_thread(lambda: module(3)) == 4
    assert module(3) == 4
    assert vars(module) == vars(Module())


def test_it_may_call_the_modules_own() -> None:
    module = Module()
    with replaced([(module, lambda x: 10 * module.forward(x))]):
        assert [module(3), module(x=4)] == [40, 50]


def test_an_error_ends_it() -> None:
    module = Module()
    with pytest.raises(ZeroDivisionError), replaced([(module, lambda x: x / 0)]):
        module(3)
    assert vars(module) == vars(Module())


def test_what_was_set_on_a_module_is_its_own() -> None:
    """As by Accelerate, whose forward brings weights to the device first."""
    module, forward = Module(), lambda x: x + 2
    module.forward = forward
    with replaced([(module, lambda x: 10 * module.forward(x))]):
        assert module(3) == 50
    assert module.forward is forward


def test_what_is_set_meanwhile_stays() -> None:
    module, forward = Module(), lambda x: x + 2
    with replaced([(module, lambda x: x * 10)]):
        module.forward = forward
    assert module.forward is forward


def test_threads_that_overlap_keep_their_own_forwards() -> None:
    """The one that entered first leaves while the other is inside its forward."""
    module, entered, go_on = Module(), threading.Event(), threading.Event()

    def waits(x: float) -> float:
        entered.set()
        assert go_on.wait(10)
        return x * 100

    def other() -> list[float]:
        with replaced([(module, waits)]):
            return [module(3), module(4)]

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(other()))
    with replaced([(module, lambda x: x * 10)]):
        thread.start()
        assert entered.wait(10)
        assert module(3) == 30
    assert module(3) == 4
    go_on.set()
    thread.join()
    assert results == [[300, 400]]
    assert vars(module) == vars(Module())


@pytest.mark.parametrize("own", [False, True])
def test_many_threads_that_come_and_go_never_meet(own: bool, frequent_switches: None) -> None:
    module, wrong = Module(), []
    more = 2 if own else 1
    if own:
        module.forward = lambda x: x + 2

    def steps(factor: int) -> None:
        for _ in range(300):
            with replaced([(module, lambda x: factor * module.forward(x))]):
                wrong.extend(x for x in (1, 2) if module(x) != factor * (x + more))
            wrong.extend(x for x in (1, 2) if module(x) != x + more)

    threads = [threading.Thread(target=steps, args=(factor,)) for factor in (3, 5, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert ("forward" in vars(module)) == own


def test_blocks_do_not_nest() -> None:
    """The inner one would end the outer one's."""
    module = Module()
    with replaced([(module, lambda x: x * 10)]):
        with pytest.raises(RuntimeError, match="within a step"), replaced([(module, lambda x: x * 100)]):
            pass
        assert module(3) == 30
    assert vars(module) == vars(Module())


def test_others_see_the_modules_own_parameters_and_copy_its_own_forward() -> None:
    module = Module()
    with replaced([(module, lambda *_: 0)]):
        assert list(inspect.signature(module.forward).parameters) == ["x"]
        copied = copy.deepcopy(module)
        assert copied(3) == 4
    assert copied.forward.__self__ is copied


def test_only_what_others_set_counts_as_set() -> None:
    module, forward = Module(), lambda x: x + 2
    with replaced([(module, lambda x: x)]):
        assert set_on(module) is None
    module.forward = forward
    assert set_on(module) is forward
    with replaced([(module, lambda x: x)]):
        assert set_on(module) is forward


def test_no_two_threads_enter_or_leave_at_once() -> None:
    """Between looking at a module and setting its forward, or taking it away, nobody else may do so."""
    module, seen = Module(), []

    def enter_and_leave() -> None:
        with replaced([(module, lambda x: x)]):
            seen.append("forward" in vars(module))
            assert may_leave.wait(10)

    for entering in (True, False):
        may_leave = threading.Event()
        thread = threading.Thread(target=enter_and_leave)
        if entering:
            with forwards._lock:
                thread.start()
                thread.join(0.1)
                assert not seen, "it waits"
            may_leave.set()
        else:
            thread.start()
            while len(seen) < 2:
                time.sleep(0.001)
            with forwards._lock:
                may_leave.set()
                thread.join(0.1)
                assert "forward" in vars(module), "it waits"
        thread.join()
    assert seen == [True, True]
    assert vars(module) == vars(Module())


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def shares(numbers: int, threads: int) -> set[int]:
    """How many numbers torch gives to a thread, for functions with the usual grain and for GELU."""
    found = set()
    for grain in (32768, numbers // threads if numbers > 24576 else 32768):
        used = min(threads, -(-numbers // grain))
        share = -(-numbers // used)
        found |= {min(share, numbers - start) for start in range(0, numbers, share)}
    return found


def whole(numbers: int, threads: int) -> bool:
    return all(share % 64 == 0 for share in shares(numbers, threads))


@given(
    rows=st.integers(1, 5000),
    widths=st.lists(st.integers(1, 12000) | st.sampled_from([2, 3, 61, 127, 10007]), min_size=1, max_size=2),
    threads=st.integers(1, 16),
)
@example(rows=4999, widths=[10007], threads=13)  # primes
@example(rows=1, widths=[10007], threads=16)
@example(rows=2048, widths=[16, 32], threads=2)  # just two threads
@example(rows=25, widths=[1024], threads=2)  # GELU uses two threads, others one
@settings(max_examples=150, deadline=None)
def test_every_thread_gets_whole_vectors(rows: int, widths: list[int], threads: int) -> None:
    extra = missing(rows, tuple(widths), threads)
    assert extra >= 0
    for width in widths:
        assert whole((rows + extra) * width, threads)
    if threads == 1:
        assert extra == -rows % math.lcm(*(64 // math.gcd(64, width) for width in widths)), "no more than needed"


class Function(torch.nn.Module):
    """Doubles what it is given, and records it."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def forward(self, x: Any, *args: Any) -> torch.Tensor:
        self.given.append((x, *args))
        return (torch.stack(x) if isinstance(x, list) else x) * 2


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (2, 5, 7), (0, 7)])
def test_rows_are_padded_and_cut(shape: tuple[int, ...]) -> None:
    module, x = Function(), torch.randn(shape)
    with replaced(functions_of(module)):
        assert same_bits(module(x, "more"), x * 2)
    given, more = module.given.pop()
    assert more == "more"
    assert given.shape == (*shape[:-2], 64 if shape[-2] else 0, 7)
    assert given.is_contiguous()
    assert same_bits(given[..., : shape[-2], :], x)
    assert same_bits(module(x), x * 2)
    assert module.given.pop()[0] is x


def test_what_is_no_matrix_is_left_alone() -> None:
    module, rows = Function(), [torch.randn(7) for _ in range(9)]
    with replaced(functions_of(module)):
        for _ in range(2):
            assert same_bits(module(rows), torch.stack(rows) * 2)
            assert same_bits(module(x=rows[0]), rows[0] * 2)
            assert same_bits(module(x=torch.stack(rows)), torch.stack(rows) * 2)
            assert same_bits(module(rows[0]), rows[0] * 2)
            assert module(3) == 6
            assert module.given[0][0] is rows
            module(torch.randn(5, 7))  # and what was padded before changes nothing
            module.given.clear()


def test_no_list_of_modules_and_no_linear_layer_is_a_function() -> None:
    """Adapters bring hundreds of empty lists, and quantized layers keep their weights elsewhere."""
    bare = torch.nn.Linear(4, 4, bias=False)
    del bare.weight
    model = torch.nn.Sequential(torch.nn.ModuleDict(), torch.nn.ParameterDict(), torch.nn.ModuleList(), bare)
    model.append(torch.nn.SiLU())
    assert [type(function) for function, _ in functions_of(model)] == [torch.nn.SiLU]


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_step_no_function_is_padded(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    layout = probe_model(model).layout
    tiles, ids = Tiles(model, layout, granule=256, budget=2**30), torch.arange(5).view(1, -1)
    seen: list[int] = []
    for function, _ in functions_of(model):
        own = function.forward

        def forward(x: torch.Tensor, *args: Any, own: Any = own, **kwargs: Any) -> Any:
            seen.append([x, *args, *kwargs.values()][-1].numel())
            return own(x, *args, **kwargs)

        monkeypatch.setattr(function, "forward", forward)
    with torch.no_grad():
        model(input_ids=ids)
        plain, cache = seen.copy(), SlabCache(layout, capacity=5)
        seen.clear()
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext(), tiles.step(cache, 5):
            model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
            if fails:
                raise KeyboardInterrupt
        assert all(inside > outside for inside, outside in zip(seen, plain, strict=True))
        seen.clear()
        model(input_ids=ids)
    assert seen == plain


_LONG = 640  # rows: enough numbers for two threads
_VALUES = 3 * torch.randn(1, _LONG, 120, generator=torch.Generator().manual_seed(1))


def run(function: torch.nn.Module, start: int, end: int) -> tuple[torch.Tensor, ...]:
    if "Rotary" not in type(function).__name__:
        return (function(_VALUES[:, start:end]),)
    layer_type = ["full_attention"] if "Gemma3" in type(function).__name__ else []
    return function(_VALUES, torch.arange(start, end).view(1, -1), *layer_type)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "gemma3_text"])
def test_rows_have_the_same_bits_alone_and_among_others(
    family: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SiLU, three kinds of GELU, and rotary angles with one table of frequencies and with several."""
    model = tiny_model(family, intermediate_size=120)
    functions = {type(function): (function, forward) for function, forward in functions_of(model)}
    assert len(functions) == (1 if family == "gpt2" else 2)
    for kind, (function, forward) in functions.items():
        counts: list[int] = []
        own = function.forward

        def counted(*args: Any, own: Any = own, counts: list[int] = counts, **kwargs: Any) -> Any:
            output = own(*args, **kwargs)
            counts += [part.numel() for part in output]
            return output

        monkeypatch.setattr(function, "forward", counted)
        with replaced([(function, forward)]):
            together = run(function, 0, _LONG)
            for rows in range(1, 71):
                start = 8 * rows - 7
                alone = run(function, start, start + rows)
                for one, other in zip(alone, together, strict=True):
                    assert same_bits(one, other[:, start : start + rows]), (kind, rows)
        # The bits do not show this where both implementations of a function happen to agree.
        assert counts
        assert all(whole(count, threads) for count in counts), kind
