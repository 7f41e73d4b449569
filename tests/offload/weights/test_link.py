"""The contract of every link. The accelerator's runs where there is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvboost.direct_io import PAGE
from kvboost.errors import CapacityError
from kvboost.offload.weights.link import AcceleratorLink, Extent, HostLink, Link
from tests.helpers.simulated_link import SimulatedLink


class Numbered:
    """A source whose slab ``n`` is made of bytes ``n``; reading waits for ``gate``."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.read_slabs: list[str] = []

    def held(self, extent: Extent) -> torch.Tensor | None:
        return None

    def read(self, extent: Extent, into: memoryview) -> None:
        self.gate.wait()
        self.read_slabs.append(extent.slab)
        if extent.slab == "13":
            raise CapacityError("no such luck")
        into[: extent.size] = bytes([int(extent.slab)]) * extent.size


def _accelerator(budget: int) -> Link:
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator here")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return AcceleratorLink(device, budget=budget)


_LINKS: dict[str, Callable[[int], Link]] = {
    "host": lambda budget: HostLink(budget=budget),
    "simulated": lambda budget: SimulatedLink(budget=budget),
    "accelerator": _accelerator,
}


@pytest.fixture(params=_LINKS)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Link]]:
    made: list[Link] = []

    def one(budget: int) -> Link:
        made.append(_LINKS[request.param](budget))
        return made[-1]

    yield one
    for link in made:
        link.close()


def test_memory_is_given_out_within_the_budget(make: Callable[[int], Link]) -> None:
    link = make(3 * PAGE)
    assert len(link.allocate(PAGE + 1)) == 2 * PAGE
    assert link.allocated == 2 * PAGE
    with pytest.raises(CapacityError, match="raise weight_budget"):
        link.allocate(PAGE + 1)
    assert len(link.allocate(PAGE)) == PAGE
    assert link.allocated == 3 * PAGE


def test_a_copy_is_whole_once_it_was_waited_for_and_runs_beside(make: Callable[[int], Link]) -> None:
    link, source = make(2 * PAGE), Numbered()
    memory = link.allocate(2 * PAGE)
    link.wait(link.copy(source, Extent("7", 0, PAGE), memory, after=link.event()))
    assert (memory[:PAGE] == 7).all()
    source.gate.clear()
    copy = link.copy(source, Extent("8", 0, 2 * PAGE), memory, after=link.event())  # returns while the source waits
    source.gate.set()
    link.wait(copy)
    assert (memory == 8).all()


def test_copies_run_in_the_order_they_were_asked_for(make: Callable[[int], Link]) -> None:
    link, source = make(PAGE), Numbered()
    memory = link.allocate(PAGE)
    copies = [link.copy(source, Extent(str(n), 0, PAGE), memory, after=link.event()) for n in range(8)]
    link.wait(copies[-1])
    assert source.read_slabs == [str(n) for n in range(8)]
    assert (memory == 7).all()


def test_a_copy_that_failed_raises_for_who_waits_and_others_go_on(make: Callable[[int], Link]) -> None:
    link, source = make(PAGE), Numbered()
    memory = link.allocate(PAGE)
    failed = link.copy(source, Extent("13", 0, PAGE), memory, after=link.event())
    good = link.copy(source, Extent("5", 0, PAGE), memory, after=link.event())
    with pytest.raises(CapacityError, match="no such luck"):
        link.wait(failed)
    link.wait(good)
    assert (memory == 5).all()


def test_the_simulated_device_computes_in_its_own_time() -> None:
    link, source = SimulatedLink(budget=PAGE, queued=True), Numbered()
    memory, seen = link.allocate(PAGE), []
    may_go_on = threading.Event()

    def look(_: Any = None) -> None:
        may_go_on.wait()
        seen.append(int(memory[0]))

    link.wait(link.copy(source, Extent("1", 0, PAGE), memory, after=link.event()))
    link.compute(look)
    second = link.copy(source, Extent("2", 0, PAGE), memory, after=link.event())
    link.wait(second)
    link.compute(look)
    time.sleep(0.02)
    assert not seen
    assert source.read_slabs == ["1"]  # the second copy waits for what was computed with the first
    may_go_on.set()
    link.close()
    assert seen == [1, 2]
    assert not link.errors
