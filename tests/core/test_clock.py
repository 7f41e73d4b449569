from __future__ import annotations

import pytest

from kvboost.core.clock import StageClock


def test_a_stage_gets_the_time_since_the_last_lap_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 11.5, 11.75, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = StageClock()
    clock.lap("plan")
    clock.lap("prefill")
    clock.lap("plan")
    assert clock.stages() == {"plan": 750.0, "prefill": 1000.0}
    assert clock.elapsed_ms == 3000.0
