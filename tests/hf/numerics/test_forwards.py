from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kvboost.hf.numerics.forwards import replaced


class Module(torch.nn.Module):
    def forward(self, x: float) -> float:
        return x + 1


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
    """One leaves while the other is inside its forward, and in a block that it entered first."""
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


def test_many_threads_that_come_and_go_never_meet() -> None:
    module, wrong = Module(), []

    def steps(factor: int) -> None:
        for _ in range(300):
            with replaced([(module, lambda x: factor * module.forward(x))]):
                wrong.extend(x for x in (1, 2) if module(x) != factor * (x + 1))
            wrong.extend(x for x in (1, 2) if module(x) != x + 1)

    threads = [threading.Thread(target=steps, args=(factor,)) for factor in (3, 5, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert vars(module) == vars(Module())
