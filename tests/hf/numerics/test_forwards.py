from __future__ import annotations

import copy
import inspect
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvboost.hf.numerics import forwards
from kvboost.hf.numerics.forwards import replaced, set_on


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
