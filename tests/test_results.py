"""What a request says of itself."""

from __future__ import annotations

from dataclasses import replace

from kvboost.types import GenerationResult, ReuseReport

_TIMES = {"waiting": 900.0, "encode": 10.0, "prefill": 150.0, "first_token": 50.0, "commit": 40.0, "decode": 999.0}


def test_a_report_is_one_line() -> None:
    report = ReuseReport(1200, 650, 98, 160, bitwise=False, timings_ms=_TIMES, plain_ms=1900.0)
    assert str(report) == (
        "1,752 of 2,010 tokens reused (1,200 exact, 552 approximate; 98 recomputed), 0.21 s instead of about 1.9 s"
    )
    exact = replace(report, moved_tokens=0, recomputed_tokens=0, plain_ms=None)
    assert str(exact) == "1,200 of 1,360 tokens reused (exact), 0.21 s"
    nothing = ReuseReport(0, 0, 0, 2010, bitwise=True, plain_ms=12_345.0, reason="it is new")
    assert str(nothing) == "0 of 2,010 tokens reused; it is new"
    assert str(replace(report, plain_ms=12_345.0)).endswith("0.21 s instead of about 12 s")


def test_recomputed_tokens_are_not_cached_tokens() -> None:
    report = ReuseReport(1200, 650, 98, 160, bitwise=False)
    result = GenerationResult("", (1,), (0,) * 2010, "stop", 1.0, 1.0, report)
    assert report.cached_tokens == result.cached_tokens == 1752
    assert result.kv_reuse_ratio == 1752 / 2010
