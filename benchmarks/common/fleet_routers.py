"""The routers that a simulated fleet is run with: ours, and what others do.

Used by :mod:`benchmarks.fleet.fleet_simulation`. Invariant: all of them see the same queues.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from benchmarks.common.fleet_load import Request
from benchmarks.common.fleet_sim import SHARED, Simulation, Strategy
from kvboost.fleet.index import FleetIndex
from kvboost.fleet.route import Router

_ABOVE = 1.5  # times the shortest queue: prefix affinity goes elsewhere, as vllm-router does
_WORTH = 0.1  # of a prompt: Ray's router follows no shorter prefix


def _seconds(queues: Mapping[str, float]) -> npt.NDArray[np.float64]:
    return np.fromiter(queues.values(), dtype=np.float64, count=len(queues))


def round_robin() -> Strategy:
    """One after the other."""
    turns = itertools.count()

    def choose(simulation: Simulation, request: Request, queues: Mapping[str, float]) -> str:
        names = list(simulation.replicas)
        while (name := names[next(turns) % len(names)]) not in queues:
            pass
        return name

    return choose


def power_of_two() -> Strategy:
    """Of two drawn the one with the shorter queue: Ray Serve's own."""
    draw = random.Random(0)

    def choose(simulation: Simulation, request: Request, queues: Mapping[str, float]) -> str:
        return min(draw.sample(list(queues), min(2, len(queues))), key=lambda name: queues[name])

    return choose


def shortest_queue() -> Strategy:
    """For the pool, whose memory is everywhere."""

    def choose(simulation: Simulation, request: Request, queues: Mapping[str, float]) -> str:
        return list(queues)[int(np.argmin(_seconds(queues)))]

    return choose


def prefix_affinity() -> Strategy:
    """The longest prefix that was sent to a replica before, unless its queue is too long.

    As Ray's and vLLM's routers: a tree of what was sent where, here without a limit, and power of two otherwise.
    """
    sent, other = FleetIndex(), power_of_two()

    def choose(simulation: Simulation, request: Request, queues: Mapping[str, float]) -> str:
        keys, prompt = request.prompt.prefix_keys, request.prompt
        run = np.bitwise_and.accumulate(sent.holders(keys), axis=0)
        bits = np.unpackbits(run.view(np.uint8), axis=1, bitorder="little")
        tokens = prompt.chunk_tokens @ bits
        most = simulation.fleet.costs.compute * prompt.prompt_tokens + _ABOVE * float(_seconds(queues).min())
        places = {name: sent.bit_of(name) for name in queues if queues[name] <= most}
        held = {name: float(tokens[place]) for name, place in places.items() if place is not None}
        found = {name: length for name, length in held.items() if length}
        best = max(found.values(), default=0.0)
        replicas = simulation.replicas
        tied = sorted((name for name in found if found[name] == best), key=lambda name: replicas[name].number)
        name = other(simulation, request, {n: queues[n] for n in tied} if tied else queues)
        sent.add(name, keys)
        return name

    return choose


def ray_affinity() -> Strategy:
    """As Ray's own router does it: the longest prefix, whatever the queue; below a tenth the one that was sent least.

    "Least" is what its tree holds of a replica: text that several prompts begin with counts once.
    """
    sent, other, held = FleetIndex(), power_of_two(), dict[str, float]()

    def choose(simulation: Simulation, request: Request, queues: Mapping[str, float]) -> str:
        keys, prompt = request.prompt.prefix_keys, request.prompt
        found = {}
        for name in queues:
            place = sent.bit_of(name)
            bits = (sent.holders(keys)[:, (place or 0) // 64] >> np.uint64((place or 0) % 64)) & np.uint64(1)
            run = np.logical_and.accumulate(bits.astype(bool)) if place is not None else np.zeros(len(keys), dtype=bool)
            found[name] = float(prompt.chunk_tokens[run].sum())
        best = max(found.values())
        if best >= _WORTH * prompt.prompt_tokens:
            tied = [name for name in found if found[name] == best]
        else:
            least = min(held.get(name, 0.0) for name in queues)
            tied = [name for name in queues if held.get(name, 0.0) == least]
        name = other(simulation, request, {name: queues[name] for name in tied})
        held[name] = held.get(name, 0.0) + prompt.prompt_tokens - found[name]
        sent.add(name, keys)
        return name

    return choose


def expected_seconds(*, shared: bool = False, at_once: bool = True) -> Strategy:
    """Ours. ``at_once``: what was sent somewhere counts as held there, before the replica says so, as under Ray."""
    routers: dict[int, Router] = {}

    def choose(simulation: Simulation, request: Request, queues: Mapping[str, float]) -> str:
        fleet = simulation.fleet
        router = routers.get(id(simulation))
        if router is None:
            name = SHARED if shared else None
            router = routers[id(simulation)] = Router(simulation.index, fleet.costs, shared=name)
        choice = router.choose(request.prompt, queues=queues, approximate=not fleet.chained).replica
        if at_once:
            keys = np.concatenate((request.prompt.prefix_keys, request.prompt.content_keys))
            simulation.index.add(choice, keys)
        return choice

    return choose
