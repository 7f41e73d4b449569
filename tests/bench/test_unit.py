"""Who is asked when: contestants that only write down what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.bench.contestants import Missing
from kvboost.bench.run import Options, Unit
from kvboost.bench.workloads import Request


class Listener:
    versions: dict[str, str] = {}
    threads = 1

    def __init__(self, name: str, heard: list[tuple[Any, ...]], *, dtype: str | None = "float32") -> None:
        self.name, self._heard, self.dtype = name, heard, dtype

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        self._heard.append((self.name, do, *order.get("tokens", ()), order.get("compare")))
        return {"rss_peak": 1, "bitwise": True}


def heard_by(*, compared: bool) -> list[tuple[Any, ...]]:
    heard: list[tuple[Any, ...]] = []
    contestants: Any = {
        "plain": Listener("plain", heard),
        "kvboost exact": Listener("kvboost", heard),
        "kvboost fast": Listener("kvboost", heard),
    }
    requests = [Request([number], "", [], True) for number in range(3)]
    Unit(contestants, Options("model", cold=1), compared=compared).run(requests, True, "label")
    return heard


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


def test_only_approximate_answers_are_compared_and_only_when_asked_for() -> None:
    assert not any(told[-1] for told in heard_by(compared=False))
    assert sum(bool(told[-1]) for told in heard_by(compared=True)) == 3  # of nine warm requests


def test_a_rival_in_another_dtype_is_no_comparison() -> None:
    def unit(dtype: str | None) -> Unit:
        contestants: Any = {"vllm": Listener("vllm", [], dtype=dtype), "kvboost exact": Listener("kvboost", [])}
        return Unit(contestants, Options("model"), compared=False)

    unit("float32")
    unit(None)  # llama.cpp: a file with several
    with pytest.raises(Missing, match="vllm: it runs in bfloat16 and ours in float32"):
        unit("bfloat16")
