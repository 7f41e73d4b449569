"""What a trace of known parts gives in every order, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runner import main
from tests.benchmarks.test_hit_rate import LENGTHS, write_trace

# Part 1 of the system prompt is in every request, part 2 in one of 101: it is volatile.
_FIRST = {"sys_prompt": [1, 2], "passages_ids": [1, 2, 3], "history": [], "web_search": [], "user_input": [9]}
_OTHERS = {"sys_prompt": [1], "passages_ids": [3, 2, 1], "history": [], "web_search": [], "user_input": [9]}
_REQUESTS = [_FIRST, *[_OTHERS] * 100]


def measured(folder: Path, *options: str) -> dict[str, Any]:
    file = folder / "out.json"
    write_trace(folder / "ragpulse", LENGTHS, _REQUESTS)
    assert main(["arrange", "--traces", str(folder), "--json", str(file), *options]) == 0
    raw: dict[str, Any] = json.loads(file.read_text())["raw"]
    return raw


def test_every_order_is_counted(tmp_path: Path) -> None:
    reused = {name: sum(kinds.values()) for name, kinds in measured(tmp_path)["reused"].items()}
    system, passages = 10, 30 + 40 + 25
    assert reused["as sent"] == 100 * system + 99 * passages
    # The volatile part stood behind the passages, but these came in another order at first.
    assert reused["volatile last"] == 100 * system + 99 * passages
    assert reused["arranged"] == 100 * (system + passages)
    assert reused["as sent, anywhere"] == 100 * (system + passages)


@pytest.mark.parametrize("most", ["1", "5"])
def test_fewer_requests_are_the_first_ones(most: str, tmp_path: Path) -> None:
    raw = measured(tmp_path, "--requests", most)
    assert raw["tokens"]["user input"] == 4 * int(most)


def test_the_short_form_runs_both_orders_on_a_model(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert main(["arrange", "--quick", "--measured", "2", "--requests", "4", "--json", str(file)]) == 0
    raw = json.loads(file.read_text())["raw"]
    assert {name: len(times) for name, times in raw["ttft_ms"].items()} == {"as sent": 2, "arranged": 2}
    assert sum(raw["exact_tokens"]["arranged"]) >= sum(raw["exact_tokens"]["as sent"])
