"""How a request ended, as the metrics count it: a choice that fails is seen, whatever the others did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvboost import KVBoost
from kvboost.scheduler.jobs import Finished, Job, NewToken, RunnerLoad
from tests.helpers.runner import Scripted
from tests.serve.conftest import Running

_ASKED = {"model": "tiny", "prompt": "a b c", "max_tokens": 4}
_ALERTS = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yml"


class _Ticket(Scripted):
    def __init__(self, reason: str) -> None:
        self._reason = reason

    def events(self) -> Iterator[NewToken | Finished]:
        yield NewToken(65)
        error = "RuntimeError: broken" if self._reason == "error" else None
        yield Finished(self._reason, None, error=error)  # type: ignore[arg-type]


class _Scripted:
    """A runner whose jobs end as they are told, in this order."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def submit(self, job: Job) -> _Ticket:
        return _Ticket(self.reasons.pop(0))

    def load(self) -> RunnerLoad:
        return RunnerLoad(0, 0, 0)

    def close(self) -> None: ...


def _finished(http: Any) -> dict[str, float]:
    """Requests by how they ended."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "kvboost_requests_total":
                found[sample.labels["finish"]] = found.get(sample.labels["finish"], 0) + sample.value
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("reasons", [["error"], ["error", "length"], ["length", "error"], ["error", "error"]])
def test_one_choice_that_fails_is_an_error(
    start_server: Callable[..., Running], make_engine: Callable[..., KVBoost], reasons: list[str], stream: bool
) -> None:
    runner = _Scripted()
    with start_server(make_engine(), runner=runner).http(None) as http:
        runner.reasons = ["length"] * len(reasons)
        assert http.post("/v1/completions", json={**_ASKED, "n": len(reasons)}).status_code == 200
        runner.reasons = list(reasons)
        answer = http.post("/v1/completions", json={**_ASKED, "n": len(reasons), "stream": stream})
        assert answer.status_code == (200 if stream else 500)
        assert _finished(http) == {"length": 1, "error": 1}


def test_failed_answers_raise_an_alarm() -> None:
    """A streamed answer that fails has the status 200: an alarm on statuses does not see it."""
    (group,) = yaml.safe_load(_ALERTS.read_text())["groups"]
    asked = [rule["expr"] for rule in group["rules"] if 'kvboost_requests_total{finish="error"}' in rule["expr"]]
    assert len(asked) == 1
    assert "rate(" in asked[0]
