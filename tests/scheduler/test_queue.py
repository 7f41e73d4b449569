from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.errors import BusyError, CapacityError
from kvboost.scheduler.queue import Limits, Scheduler

_CHUNK = 8
_READS_PASSED = 8


def limits(**changes: int) -> Limits:
    usual = {"max_running": 3, "max_waiting": 100, "kv_bytes": 100, "chunk_budget": _CHUNK, "max_wait_steps": 4}
    return Limits(**{**usual, **changes})


@dataclass
class Simulated:
    """A job and how far it has come."""

    arrives: int
    tenant: str
    nbytes: int
    text: int
    chunks: int
    tokens: int
    number: int = -1
    read: int = 0
    found: int = 0
    produced: int = 0
    fed: int = 0
    began_to_wait: int = 0
    ahead: int = 0
    waits: list[tuple[int, int]] = field(default_factory=list)

    @property
    def chain(self) -> tuple[bytes, ...]:
        """Texts with equal numbers modulo 3 share their first two chunks."""
        own = [f"{self.text % 3}.{i}" if i < 2 else f"{self.text}.{i}" for i in range(self.chunks)]
        return tuple(key.encode() for key in own)


class World:
    """Runs a scheduler as the batching does, without a model, and checks it at every step."""

    def __init__(self, settings: Limits, jobs: list[Simulated]) -> None:
        self.scheduler, self.settings = Scheduler(settings), settings
        self.to_come = sorted(jobs, key=lambda job: job.arrives)
        self.live: dict[int, Simulated] = {}
        self.admitted: set[int] = set()
        self.stored: set[bytes] = set()
        self.computed: list[bytes] = []
        self.now = 0
        self.done: list[Simulated] = []

    def run(self) -> None:
        while self.to_come or self.live:
            self.step()
            assert self.now < 100_000, "somebody never ends"

    def step(self) -> None:
        while self.to_come and self.to_come[0].arrives <= self.now:
            job = self.to_come.pop(0)
            job.ahead, job.began_to_wait = self.scheduler.waiting, self.now
            job.number = self.scheduler.add(tenant=job.tenant, nbytes=job.nbytes, chain=job.chain)
            self.live[job.number] = job
        while (number := self.scheduler.preempt()) is not None:
            job = self.live[number]
            assert job.produced > 0
            self.admitted.remove(number)
            job.ahead, job.began_to_wait, job.fed = self.scheduler.waiting - 1, self.now, 0
        while (number := self.scheduler.admit()) is not None:
            job = self.live[number]
            self.admitted.add(number)
            job.waits.append((self.now - job.began_to_wait, job.ahead))
            job.read = next((i for i, key in enumerate(job.chain) if key not in self.stored), len(job.chain))
            self.scheduler.opened(number, available=job.read, will_provide=len(job.chain), steps=self.left(job))
        used = 0
        while numbers := self.scheduler.next_prefill(used=used, budget=self.settings.chunk_budget):
            jobs = [self.live[number] for number in numbers]
            assert len(jobs) == 1 or all(len(self.left(job)) == 1 for job in jobs), "only last steps run together"
            rows = sum(self.left(job)[0] for job in jobs)
            assert (not used and len(jobs) == 1) or used + rows <= self.settings.chunk_budget, "one step, or what fits"
            used += rows
            for job in jobs:
                self.prefilled(job)
        for number in self.scheduler.decoding():
            job = self.live[number]
            job.fed += 1
            if job.fed >= job.produced:
                self.draw(job)
                if job.number in self.live:
                    self.scheduler.decoded(number)
        self.scheduler.tick()
        self.now += 1
        assert self.scheduler.running == len(self.admitted) <= self.settings.max_running
        assert self.scheduler.reserved_bytes == sum(self.live[n].nbytes for n in self.admitted)
        assert self.scheduler.reserved_bytes <= self.settings.kv_bytes

    def prefilled(self, job: Simulated) -> None:
        if job.read < len(job.chain):
            self.computed.append(job.chain[job.read])
            self.stored.add(job.chain[job.read])
        job.read += 1
        self.scheduler.prefilled(job.number, available=min(job.read, len(job.chain)), steps=self.left(job))
        if not self.left(job):
            self.draw(job)

    def left(self, job: Simulated) -> list[int]:
        """The chunks that are missing, and a short last step."""
        return [*[_CHUNK] * (len(job.chain) - job.read), 3][: max(0, len(job.chain) + 1 - job.read)]

    def draw(self, job: Simulated) -> None:
        if job.produced == 0 or job.fed >= job.produced:
            job.produced += 1
        if job.produced >= job.tokens:
            self.scheduler.remove(job.number)
            self.admitted.remove(job.number)
            self.done.append(self.live.pop(job.number))


_jobs = st.lists(
    st.builds(
        Simulated,
        arrives=st.integers(0, 40),
        tenant=st.sampled_from("abc"),
        nbytes=st.integers(1, 100),
        text=st.integers(0, 8),
        chunks=st.integers(0, 5),
        tokens=st.integers(1, 60),
    ),
    min_size=1,
    max_size=40,
)


@settings(deadline=None)
@given(jobs=_jobs, max_running=st.integers(1, 5), max_wait_steps=st.integers(1, 20))
def test_every_wait_is_bounded_by_those_who_came_before(
    jobs: list[Simulated], max_running: int, max_wait_steps: int
) -> None:
    world = World(limits(max_running=max_running, max_wait_steps=max_wait_steps), jobs)
    world.run()
    assert len(world.done) == len(jobs)
    reading = 6 * (_READS_PASSED + max_running)  # each of at most 6 steps waits for so many others
    turn = reading + 60 + max_wait_steps + 2  # then come replayed tokens, and those that nobody may interrupt
    for job in jobs:
        for waited, ahead in job.waits:
            assert waited <= max_wait_steps + (ahead + 1) * turn


def test_a_large_job_is_not_starved_by_small_ones() -> None:
    small = [Simulated(3 * i, "a", 40, 100 + i, 1, 6) for i in range(100)]
    large = Simulated(3, "a", 90, 1, 1, 5)
    world = World(limits(max_running=4, max_wait_steps=10), [*small, large])
    world.run()
    assert large.waits[0][0] <= 10 + 20, "max_wait_steps, and those that ran then"
    assert world.done.index(large) < 30


def test_a_job_behind_endless_ones_waits_no_longer_than_max_wait_steps() -> None:
    endless = [Simulated(0, "a", 10, i, 1, 2000) for i in range(3)]
    late = Simulated(5, "a", 10, 9, 1, 5)
    world = World(limits(max_wait_steps=20), [*endless, late])
    world.run()
    assert late.waits[0][0] <= 25
    assert sorted(job.produced for job in endless) == [2000] * 3, "who made room goes on where it stopped"


def test_a_tenant_with_many_jobs_leaves_room_for_another() -> None:
    many = [Simulated(0, "greedy", 10, i, 0, 30) for i in range(50)]
    one = Simulated(1, "modest", 10, 3, 0, 3)
    world = World(limits(max_wait_steps=1000), [*many, one])
    world.run()
    assert world.done.index(one) <= 3, "the next slot is theirs, not the fiftieth"


def test_a_beginning_that_several_need_is_read_once() -> None:
    jobs = [Simulated(0, "a", 10, 3 * i, 4, 2) for i in range(6)]
    world = World(limits(max_running=6, max_wait_steps=1000), jobs)
    world.run()
    assert sorted(world.computed) == sorted({key for job in jobs for key in job.chain})
    assert len(world.computed) == 2 + 6 * 2


def test_who_waits_for_a_beginning_is_let_go_when_its_reader_ends() -> None:
    scheduler = Scheduler(limits())
    first = scheduler.add(tenant="", nbytes=1, chain=[b"x", b"y"])
    second = scheduler.add(tenant="", nbytes=1, chain=[b"x", b"y", b"z"])
    assert scheduler.admit() == first
    assert scheduler.admit() is None, "its beginning is not known yet"
    scheduler.opened(first, available=0, will_provide=2, steps=[8, 8, 3])
    assert scheduler.admit() is None
    scheduler.remove(first)
    assert scheduler.admit() == second


def test_a_job_that_provides_nothing_is_not_waited_for() -> None:
    scheduler = Scheduler(limits())
    first = scheduler.add(tenant="", nbytes=1, chain=[b"x", b"y"])
    second = scheduler.add(tenant="", nbytes=1, chain=[b"x", b"z"])
    scheduler.admit()
    scheduler.opened(
        first, available=0, will_provide=0, steps=[16, 3]
    )  # its first chunk is moved, so nobody can share it
    assert scheduler.admit() == second


def test_short_prompts_go_first_but_not_for_ever() -> None:
    scheduler = Scheduler(limits(max_running=100))
    numbers = [scheduler.add(tenant="", nbytes=1, chain=[]) for _ in range(30)]
    for number in numbers:
        assert scheduler.admit() == number
        scheduler.opened(number, available=0, will_provide=0, steps=[2, 2] if number == 0 else [2])
    order = []
    while numbers := scheduler.next_prefill(used=_CHUNK - 2, budget=_CHUNK):  # room for one of them
        order.extend(numbers)
        [number] = numbers
        left = [2] if number == 0 and order.count(0) == 1 else []
        scheduler.prefilled(number, available=0, steps=left)
    assert order[0] == 1
    assert order.index(0) == _READS_PASSED


def test_long_prompts_are_not_passed_by_more_short_ones_because_those_run_together() -> None:
    scheduler = Scheduler(limits(max_running=100, chunk_budget=16))
    for number in range(31):
        assert scheduler.add(tenant="", nbytes=1, chain=[]) == scheduler.admit() == number
        scheduler.opened(number, available=0, will_provide=0, steps=[16, 16] if number == 0 else [4])
    order: list[int] = []
    while 0 not in order:
        order += scheduler.next_prefill(used=0, budget=scheduler.limits.chunk_budget)
        for number in order:
            scheduler.prefilled(number, available=0, steps=[])
    assert len(order) - 1 == _READS_PASSED, "two steps of four"


def test_a_joint_step_is_no_longer_than_memory_was_planned_for() -> None:
    scheduler = Scheduler(limits(max_running=100, chunk_budget=16, max_step=7))
    for number in range(4):
        assert scheduler.add(tenant="", nbytes=1, chain=[]) == scheduler.admit() == number
        scheduler.opened(number, available=0, will_provide=0, steps=[3])
    assert scheduler.next_prefill(used=0, budget=scheduler.limits.chunk_budget) == [0, 1]


def test_last_steps_that_fit_the_budget_run_together() -> None:
    scheduler = Scheduler(limits(max_running=100, chunk_budget=16))
    steps = [[3], [16, 3], [9], [4], [2]]
    for number, each in enumerate(steps):
        assert scheduler.add(tenant="", nbytes=1, chain=[]) == scheduler.admit() == number
        scheduler.opened(number, available=0, will_provide=0, steps=each)
    assert scheduler.next_prefill(used=0, budget=scheduler.limits.chunk_budget) == [4, 0, 3], (
        "2 + 3 + 4 tokens, and the next shortest has 9"
    )
    for number in (4, 0, 3):
        scheduler.prefilled(number, available=0, steps=[])
    assert scheduler.next_prefill(used=9, budget=scheduler.limits.chunk_budget) == []
    assert scheduler.next_prefill(used=0, budget=scheduler.limits.chunk_budget) == [2]
    scheduler.prefilled(2, available=0, steps=[])
    assert scheduler.next_prefill(used=0, budget=scheduler.limits.chunk_budget) == [1], (
        "a step that is not the last runs alone"
    )


def test_what_can_never_fit_and_what_is_too_much_is_refused() -> None:
    scheduler = Scheduler(limits(max_waiting=2))
    with pytest.raises(CapacityError, match="101 bytes of KV, of which 100 are allowed"):
        scheduler.add(tenant="", nbytes=101, chain=[])
    for _ in range(2):
        scheduler.add(tenant="", nbytes=100, chain=[])
    with pytest.raises(CapacityError, match="try again later"):
        scheduler.add(tenant="", nbytes=1, chain=[])


def test_a_tenant_that_fills_the_queue_does_not_shut_out_another() -> None:
    scheduler = Scheduler(limits(max_waiting=4))

    def fill(tenant: str) -> int:
        for count in range(100):
            try:
                scheduler.add(tenant=tenant, nbytes=1, chain=[])
            except BusyError:
                return count
        raise AssertionError("nobody is ever refused")

    assert [fill(tenant) for tenant in "abab"] == [4, 2, 0, 0]
    assert [fill(tenant) for tenant in "cdefg"] == [1, 1, 1, 1, 1], "each of them may wait with one at least"


def test_a_larger_workspace_counts_while_it_is_held() -> None:
    scheduler = Scheduler(limits())
    first = scheduler.add(tenant="", nbytes=10, chain=[])
    scheduler.add(tenant="", nbytes=50, chain=[])
    scheduler.admit()
    scheduler.opened(first, available=0, will_provide=0, steps=[3], held=60)
    assert scheduler.reserved_bytes == 60
    assert scheduler.admit() is None
    scheduler.remove(first)
    assert scheduler.admit() is not None


def test_a_job_that_must_grow_preempts_the_last_to_arrive() -> None:
    scheduler = Scheduler(limits())
    with pytest.raises(CapacityError, match="101 bytes"):
        scheduler.add(tenant="", nbytes=10, peak=101, chain=[])
    first, second, third = (scheduler.add(tenant="", nbytes=30, peak=100, chain=[]) for _ in range(3))
    for number in (first, second, third):
        assert scheduler.admit() == number
        scheduler.opened(number, available=0, will_provide=0, steps=[])
    assert scheduler.grow(first, 40)
    assert not scheduler.grow(second, 60)
    assert scheduler.preempt_for(second, 60) == third
    assert scheduler.grow(second, 60)
    assert scheduler.admit() is None, "the third waits for its 30 bytes"
    assert not scheduler.grow(second, 70)
    assert scheduler.preempt_for(second, 70) == second, "the first to arrive is never preempted"
    assert scheduler.reserved_bytes == 40
    assert scheduler.admit() == third, "30 bytes are free, 70 are not"
    scheduler.remove(first)
    scheduler.remove(third)
    assert scheduler.admit() == second
    assert scheduler.reserved_bytes == 70


def test_a_job_that_was_cut_finer_than_at_its_submission_holds_nobody_up() -> None:
    """A document that became known meanwhile adds cuts: more chunks are available than its chain has."""
    scheduler = Scheduler(limits())
    first = scheduler.add(tenant="one", nbytes=1, chain=[b"a", b"b"])
    assert scheduler.admit() == first
    scheduler.opened(first, available=2, will_provide=4, steps=[8, 8])
    second = scheduler.add(tenant="one", nbytes=1, chain=[b"a", b"b", b"c", b"d"])
    assert scheduler.admit() == second


def test_a_job_whose_kv_is_loading_is_passed_keeps_its_place_and_preempts_nobody() -> None:
    scheduler = Scheduler(limits(max_running=1))
    running = scheduler.add(tenant="t", nbytes=1, chain=())
    assert scheduler.admit() == running
    scheduler.opened(running, available=0, will_provide=0, steps=[])
    loading = scheduler.add(tenant="t", nbytes=1, chain=(), loading=True)
    for _ in range(10):
        scheduler.decoded(running)
        scheduler.tick()
    assert scheduler.preempt() is None, "it could not run"
    scheduler.remove(running)
    late, later = (scheduler.add(tenant="t", nbytes=1, chain=()) for _ in range(2))
    assert scheduler.admit() == late
    scheduler.remove(late)
    scheduler.loaded(loading)
    assert scheduler.admit() == loading, "it came before the other"
    scheduler.remove(loading)
    assert scheduler.admit() == later


def test_a_postponed_job_waits_until_it_is_loaded() -> None:
    scheduler = Scheduler(limits())
    first, other = (scheduler.add(tenant="t", nbytes=60, chain=()) for _ in range(2))
    assert scheduler.admit() == first
    scheduler.postpone(first)
    assert (scheduler.running, scheduler.waiting, scheduler.reserved_bytes, scheduler.preempted) == (0, 2, 0, 0)
    assert scheduler.admit() == other
    assert scheduler.admit() is None
    scheduler.remove(other)
    assert scheduler.admit() is None
    scheduler.loaded(first)
    assert scheduler.admit() == first


def test_the_group_of_a_job_that_is_loading_does_not_hold_another_up() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(tenant="t", nbytes=1, chain=(), group="a", loading=True)
    assert scheduler.group() == "a", "there is no other"
    other = scheduler.add(tenant="t", nbytes=1, chain=())
    assert scheduler.group() == ""
    assert scheduler.admit("") == other
