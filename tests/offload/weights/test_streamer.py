"""The streamer over the simulated device, whose memory is poisoned as soon as a copy into it begins."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.errors import CapacityError
from kvboost.offload.weights.link import Extent, FileSource, HostSource
from kvboost.offload.weights.skeleton import place_weights
from kvboost.offload.weights.slabs import REST, SlabFolder, lay_out, make_slabs
from kvboost.offload.weights.streamer import WeightStreamer
from tests.helpers.simulated_link import SimulatedLink

_LAYERS = 6


class Stack(torch.nn.Module):
    """Layers of two matrices each, filled with their own number; computes nothing by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {"up": torch.nn.Linear(40, 60, bias=False), "down": torch.nn.Linear(60, 40, bias=False)}
            )
            for _ in range(_LAYERS)
        )


def _number(name: str) -> float:
    _, layer, module, _ = name.split(".")
    return 2.0 * int(layer) + (module == "down")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> SlabFolder:
    described: list[list[Any]] = [[] for _ in range(_LAYERS)]
    for name, parameter in Stack().named_parameters():
        described[int(name.split(".")[1])].append((name, parameter.dtype, parameter.shape))
    slabs = [
        lay_out(REST, [("norm", torch.float32, (4,))]),
        *(lay_out(f"layer-{i}", d) for i, d in enumerate(described)),
    ]
    sizes = {w.name: w for slab in slabs for w in slab.weights}

    def pieces(name: str) -> list[memoryview]:
        number = _number(name) if name != "norm" else 1.0
        return [memoryview(torch.full(sizes[name].shape, number).numpy().tobytes())]

    return make_slabs(tmp_path_factory.mktemp("slabs"), slabs, pieces=pieces, key="a")


def _budget(folder: SlabFolder, *, resident: int, whole: bool = True) -> int:
    layer = folder.layers[0].size
    return folder.rest.size + (2 * layer + resident * layer if whole else layer)


def _streamer(folder: SlabFolder, link: SimulatedLink, budget: int, source: Any = None) -> WeightStreamer:
    placement = place_weights(folder.rest, folder.layers, budget=budget)
    link.allocate(folder.rest.size)
    return WeightStreamer(Stack(), placement=placement, link=link, source=source or FileSource(folder), folder=folder)


def _check(streamer: WeightStreamer, link: SimulatedLink, index: int, seconds: Callable[[], float]) -> None:
    """Compute with a unit: its weights must be there from the beginning to the end."""
    places = streamer._targets[index]
    tensors = [(place.module._parameters[place.key], _number(place.weight.name)) for place in places]

    def work() -> None:
        for moment in range(2):
            for tensor, number in tensors:
                assert tensor is not None
                assert (tensor == number).all(), f"unit {index}: {tensor[0, 0]} instead of {number} ({moment=})"
            time.sleep(seconds())

    link.compute(work)


@given(
    seed=st.integers(0, 10**6),
    queued=st.booleans(),
    resident=st.integers(0, _LAYERS - 3),
    whole=st.booleans(),
    held=st.booleans(),
    passes=st.lists(st.integers(1, 2 * _LAYERS), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_no_buffer_changes_while_it_is_in_use_under_random_delays(
    folder: SlabFolder, seed: int, queued: bool, resident: int, whole: bool, held: bool, passes: list[int]
) -> None:
    luck = random.Random(seed)

    def delay() -> float:
        return luck.choice([0.0, 0.0, 0.0, 0.001, 0.003])

    budget = _budget(folder, resident=resident, whole=whole)
    link = SimulatedLink(budget=budget, queued=queued, delay=delay)
    source = HostSource(folder, torch.device("cpu")) if held else FileSource(folder)
    streamer = _streamer(folder, link, budget, source)
    for length in passes:  # some end early, as a pass does that has seen enough
        for unit in streamer.placement.units[:length]:
            streamer.need(unit.index)
            _check(streamer, link, unit.index, delay)
        streamer._one_at_a_time(lambda: None)()
    link.close()
    if link.errors:
        raise link.errors[0]
    assert link.allocated <= budget
    assert link.allocated == streamer.placement.memory.resident + 2 * streamer.placement.buffer_bytes


def test_never_more_than_what_stays_and_two_layers(folder: SlabFolder) -> None:
    largest = max(slab.size for slab in folder.layers)
    for resident in range(_LAYERS - 2):
        link = SimulatedLink(budget=_budget(folder, resident=resident))
        streamer = _streamer(folder, link, _budget(folder, resident=resident))
        assert len(streamer.placement.resident) == resident
        for _ in range(2):
            for unit in streamer.placement.units:
                streamer.need(unit.index)
        assert link.allocated <= streamer.placement.memory.resident + 2 * largest
        link.close()


def _overlap(folder: SlabFolder, *, computing: float, copying: float, passes: int) -> float:
    budget = _budget(folder, resident=1)
    link = SimulatedLink(budget=budget, bytes_per_second=folder.layers[0].size / copying)
    streamer = _streamer(folder, link, budget)
    for unit in streamer.placement.units:  # the first layers of the first pass come too late whatever one does
        streamer.need(unit.index)
        time.sleep(computing)
    waited, copied = streamer.stats().waited_seconds, link.copy_seconds
    for _ in range(passes):
        for unit in streamer.placement.units:
            streamer.need(unit.index)
            time.sleep(computing)
    hidden = 1.0 - (streamer.stats().waited_seconds - waited) / (link.copy_seconds - copied)
    assert streamer.stats().misses == 0
    link.close()
    return hidden


def test_nine_tenths_of_the_copying_hide_behind_longer_computing(folder: SlabFolder) -> None:
    # The best of four: another process may hold a thread up at any time.
    assert any(_overlap(folder, computing=0.03, copying=0.02, passes=2) >= 0.9 for _ in range(4))


def test_when_copying_takes_longer_the_link_never_rests(folder: SlabFolder) -> None:
    def busy() -> float:
        budget = _budget(folder, resident=0)
        link = SimulatedLink(budget=budget, bytes_per_second=folder.layers[0].size / 0.03)
        streamer = _streamer(folder, link, budget)
        begun, before = time.perf_counter(), link.copy_seconds
        for _ in range(2):
            for unit in streamer.placement.units:
                streamer.need(unit.index)
                time.sleep(0.01)
        share = (link.copy_seconds - before) / (time.perf_counter() - begun)
        link.close()
        return share

    assert any(busy() >= 0.9 for _ in range(4))


def test_each_pass_reads_each_streamed_unit_once_and_wraps_round(folder: SlabFolder) -> None:
    budget = _budget(folder, resident=2)
    link = SimulatedLink(budget=budget)
    streamer = _streamer(folder, link, budget)
    resident = [streamer.placement.units[i].extent for i in sorted(streamer.placement.resident)]

    def forward() -> None:
        for unit in streamer.placement.units:
            streamer.need(unit.index)

    for _ in range(3):
        streamer._one_at_a_time(forward)()
    link.close()
    streamed = [unit.extent for unit in streamer.placement.streamed]
    assert link.copies == [*resident, *streamed, *streamed, *streamed, *streamed[:2]]
    assert streamer.stats().loads == 3 * len(streamed) + 2
    assert streamer.stats().streamed_bytes == sum(extent.size for extent in [*streamed * 3, *streamed[:2]])


def test_a_weight_that_is_not_there_has_no_memory(folder: SlabFolder) -> None:
    budget = _budget(folder, resident=0)
    link = SimulatedLink(budget=budget)
    streamer = _streamer(folder, link, budget)
    streamer.need(0)
    assert [p.module._parameters[p.key].device.type for p in streamer._targets[0]] == ["cpu", "cpu"]
    streamer.need(1)
    for index in (0, *range(2, _LAYERS)):
        assert [p.module._parameters[p.key].device.type for p in streamer._targets[index]] == ["meta", "meta"]
    link.close()


class _Moody:
    """Fails at the second read of one slab."""

    def __init__(self, source: FileSource) -> None:
        self._source, self._reads = source, 0

    def held(self, extent: Extent) -> None:
        return None

    def read(self, extent: Extent, into: memoryview) -> None:
        self._reads += extent.slab == "layer-3"
        if extent.slab == "layer-3" and self._reads == 2:
            raise CapacityError("the disk is gone")
        self._source.read(extent, into)


def test_a_read_that_fails_is_an_error_and_the_next_try_reads_again(folder: SlabFolder) -> None:
    budget = _budget(folder, resident=0)
    link = SimulatedLink(budget=budget)
    streamer = _streamer(folder, link, budget, _Moody(FileSource(folder)))
    for attempt in range(3):
        for unit in streamer.placement.units:
            if (attempt, unit.index) == (1, 3):
                with pytest.raises(CapacityError, match="the disk is gone"):
                    streamer.need(unit.index)
            streamer.need(unit.index)
            _check(streamer, link, unit.index, lambda: 0.0)
    link.close()


def test_passes_of_several_threads_take_turns(folder: SlabFolder) -> None:
    budget = _budget(folder, resident=1)
    link = SimulatedLink(budget=budget)
    streamer = _streamer(folder, link, budget)
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        luck = random.Random(seed)

        def forward() -> None:
            for unit in streamer.placement.units:
                streamer.need(unit.index)
                _check(streamer, link, unit.index, lambda: luck.choice([0.0, 0.0005]))

        try:
            for _ in range(5):
                streamer._one_at_a_time(forward)()
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    link.close()
    assert not errors


def test_a_digest_follows_the_name_and_is_read_again_only_for_another(folder: SlabFolder) -> None:
    link = SimulatedLink(budget=_budget(folder, resident=0))
    streamer = _streamer(folder, link, _budget(folder, resident=0))
    place = streamer._targets[2][1]
    assert streamer.holds(place.module, place.key)
    assert streamer.digest(place.module, place.key, place.weight.name).hex() == folder.digests[place.weight.name]
    renamed = streamer.digest(place.module, place.key, "base." + place.weight.name)
    assert renamed.hex() == folder.digest("layer-2", place.weight, name="base." + place.weight.name)
    assert renamed.hex() != folder.digests[place.weight.name]
    link.close()
