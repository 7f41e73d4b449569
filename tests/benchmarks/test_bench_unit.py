"""Who is asked when: contestants that only write down what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bench.contestants import Missing
from benchmarks.bench.run import Options, Unit
from benchmarks.bench.workloads import TextRequest


class Listener:
    versions: dict[str, str] = {}
    threads = 1

    def __init__(self, name: str, heard: list[tuple[Any, ...]], *, dtype: str | None = "float32") -> None:
        self.name, self._heard, self.dtype = name, heard, dtype

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        self._heard.append((self.name, do, *order.get("tokens", ()), order.get("new"), order.get("compare")))
        quality = {"quality": {"kl": 0.5}} if order.get("compare") else {}
        return {"rss_peak": 1, "bitwise": True, "peak_reset": order.get("reset_peak", False), **quality}


def heard_by(*, compared: bool) -> list[tuple[Any, ...]]:
    return ran(compared=compared)[0]


def ran(*, compared: bool) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    heard: list[tuple[Any, ...]] = []
    contestants: Any = {
        "plain": Listener("plain", heard),
        "kvboost exact": Listener("kvboost", heard),
        "kvboost fast": Listener("kvboost", heard),
    }
    requests = [TextRequest([number], []) for number in range(3)]
    sample = Unit(contestants, Options("model", cold=1), compared=compared).run(requests, True, "label")
    return heard, sample


def test_the_first_to_go_changes_and_the_cold_control_forgets_before_each_request() -> None:
    heard = [told[:3] for told in heard_by(compared=False)]
    assert [told for told in heard if told[1] == "generate"][:9:3] == [
        ("plain", "generate", 0),
        ("kvboost", "generate", 1),
        ("kvboost", "generate", 2),
    ]
    cold = heard[3 + 9 : 3 + 9 + 6]
    assert [told[1] for told in cold] == ["forget", "generate"] * 3
    assert {told[2] for told in cold[1::2]} == {1}


def test_cold_answers_have_one_token() -> None:
    asked = [told for told in heard_by(compared=False) if told[1] == "generate"]
    assert [told[3] for told in asked] == [16] * 9 + [1] * 3


def test_only_approximate_answers_are_compared_and_behind_all_that_is_timed() -> None:
    heard, sample = ran(compared=False)
    assert not any(told[-1] for told in heard)
    assert not any("quality" in answer for answer in sample["warm"]["kvboost fast"])
    heard, sample = ran(compared=True)
    asked = [told for told in heard if told[1] == "generate"]
    assert [bool(told[-1]) for told in asked] == [False] * 12 + [True] * 3  # nine warm and three cold before
    before = heard.index(asked[12]) - 1
    assert heard[before][:2] == ("kvboost", "forget")  # it finds what it found when it was timed
    assert max(n for n, told in enumerate(heard) if told[1] == "status") < before  # logits are not its memory
    assert all(answer["quality"] == {"kl": 0.5} for answer in sample["warm"]["kvboost fast"])
    assert not any("quality" in answer for answer in sample["warm"]["kvboost exact"])


def test_memory_begins_anew_with_each_workload() -> None:
    sample = ran(compared=False)[1]
    assert sample["rss_reset"] == dict.fromkeys(("plain", "kvboost exact", "kvboost fast"), True)


def test_a_rival_in_another_dtype_is_no_comparison() -> None:
    def unit(dtype: str | None) -> Unit:
        contestants: Any = {"vllm": Listener("vllm", [], dtype=dtype), "kvboost exact": Listener("kvboost", [])}
        return Unit(contestants, Options("model"), compared=False)

    unit("float32")
    unit(None)  # llama.cpp: a file with several
    with pytest.raises(Missing, match="vllm: it runs in bfloat16 and ours in float32"):
        unit("bfloat16")
