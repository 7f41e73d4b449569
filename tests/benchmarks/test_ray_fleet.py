"""What the benchmarks of real fleets do before and after there is one: requests, bars, errors. Needs no Ray."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common import ray_fleet as fleets
from benchmarks.common.fleet_load import Request
from benchmarks.common.fleet_requests import MadeUpText, scaled_requests, simulated_requests
from benchmarks.common.fleet_routers import ray_affinity
from benchmarks.common.fleet_sim import Fleet, Simulation
from benchmarks.common.report import Report
from benchmarks.common.stand_ins import make_traces
from benchmarks.common.traces import read
from benchmarks.fleet import ray_faults, ray_fleet
from benchmarks.fleet.ray_fleet import Answer, Outcome
from benchmarks.internals import break_table, make_chunker, token_array
from benchmarks.runner import main
from kvboost.fleet.route import RouteCosts, RoutePrompt
from tests.helpers.tokenizer import byte_tokenizer, word_tokenizer


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_traces(tmp_path_factory.mktemp("traces"))


def test_equal_ids_are_equal_text_that_is_cut_at_its_end_wherever_it_stands() -> None:
    tokenizer = word_tokenizer(["some words of letters\n\n" * 9], vocab_size=300)  # a blank line is a token
    text = MadeUpText(tokenizer)
    chunker = make_chunker("natural", size=16, breaks=break_table(tokenizer))
    part, other = text.of(b"a part", 50), text.of(b"another", 33)
    assert part == text.of(b"a part", 50) != other
    assert (len(part), len(other)) == (50, 33)
    for parts in ([part, other], [other, part], [other, other, part]):
        ends = np.cumsum([len(each) for each in parts]).tolist()
        assert set(ends) <= set(chunker.cut(token_array([token for each in parts for token in each])))


@pytest.mark.parametrize("name", ["conversation", "ragpulse"])
def test_requests_have_the_shape_of_their_trace(traces: Path, name: str) -> None:
    tokenizer = byte_tokenizer()
    made = scaled_requests(traces, name, text=MadeUpText(tokenizer), count=30, scale=16.0, longest=400)
    trace = read(traces, name)
    assert len(made.prompts) == 30
    assert max(map(len, made.prompts)) <= 400
    whole = scaled_requests(traces, name, text=MadeUpText(tokenizer), count=30, scale=16.0, longest=10**6)
    assert len(whole.prompts[7]) == pytest.approx(sum(trace.prompts[7].tokens) / 16, rel=0.1)
    assert whole.own_footprint < whole.footprint
    again = simulated_requests(made, tokenizer, chunk_size=16, arrivals=[30.0 - number for number in range(30)])
    assert [request.number for request in again] == list(range(29, -1, -1))
    assert all(request.prompt.prompt_tokens == len(made.prompts[request.number]) for request in again)
    seen = [{int(key) for key in request.prompt.content_keys} for request in again]
    assert any(one & two for one, two in pairwise(seen)), "text is shared as in the trace"


def _request(*keys: int) -> Request:
    own = np.array(keys, dtype=np.uint64)
    return Request(0, 0.0, RoutePrompt(own, own, np.full(len(keys), 10.0), 10 * len(keys)))


def test_as_rays_router_the_longest_prefix_is_followed_and_else_who_was_sent_least() -> None:
    fleet = Fleet(3, 10**6, RouteCosts(compute=1.0, move=0.1), chained=True)
    choose = ray_affinity()
    simulation = Simulation(fleet, choose, count=1)
    queues = dict.fromkeys(simulation.replicas, 0.0)

    def send(*keys: int) -> str:
        return choose(simulation, _request(*keys), queues)

    first = send(*range(1, 21))
    second = send(101, 102)
    third = send(201, 202)
    assert len({first, second, third}) == 3
    queues[first] = 1e9  # it follows a prefix whatever the queue
    assert send(1, 2, 3, 4, 5) == first
    assert send(1, *range(301, 320)) != first, "less than a tenth"


def _outcome(memory: int, redis: int = 0, loaded: int = 0) -> Outcome:
    answer = Answer(sent=0.0, seconds=0.1, tokens=100, memory=memory, redis=redis, server_seconds=0.05)
    return Outcome([answer, replace(answer, sent=1.0)], loaded, 0.1, 0, [1, 1])


@pytest.mark.parametrize(
    ("part", "ours", "other", "held"),
    [
        ("prefixes", _outcome(20, 9), _outcome(30), False),
        ("prefixes", _outcome(20, 10), _outcome(30), True),
        ("content", _outcome(54, loaded=60), _outcome(50, loaded=100), False),
        ("content", _outcome(55, loaded=70), _outcome(50, loaded=100), False),
        ("content", _outcome(55, loaded=60), _outcome(50, loaded=100), True),
        ("content", _outcome(0), _outcome(0), False),
    ],
)
def test_the_bars_are_those_of_the_page(part: str, ours: Outcome, other: Outcome, held: bool) -> None:
    report = Report("ray_fleet")
    ray_fleet._judge(report, part, {"content": ours, "prefix affinity": other, "pooled": other})
    assert report.failed is not held
    alone = Report("ray_fleet")
    ray_fleet._judge(alone, part, {"content": ours})
    assert not alone.tables
    assert not alone.failed


@pytest.mark.parametrize("name", ["ray_fleet", "ray_faults"])
def test_without_ray_it_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleets, "find_spec", lambda name: None)
    given = ["--model", str(tmp_path)] + (["--traces", str(tmp_path)] if name == "ray_fleet" else [])
    assert main([name, *given]) == 2
    assert "--ray-venv" in capsys.readouterr().err
    assert main([name, *given, "--ray-venv", str(tmp_path)]) == 2
    assert "no Python" in capsys.readouterr().err


def _asked(began: float, ended: float, **more: Any) -> ray_faults.Asked:
    return ray_faults.Asked(began, ended, **{"failure": None, "wrong": False, "found": True, **more})


def test_hits_are_back_with_the_first_of_ten_in_a_row() -> None:
    load = ray_faults.Load(None, [], [])  # type: ignore[arg-type]
    load.asked = [_asked(n, n + 1.0) for n in range(12)]
    assert load.hits_back(3.0) is None, "only eight after that"
    load.asked += [_asked(12, 13.0, found=False)] + [_asked(n, n + 1.0) for n in range(13, 23)]
    assert load.hits_back(5.0) == 14.0
    load.asked[15] = _asked(15, 16.0, failure="status 500")
    assert load.hits_back(5.0) is None
