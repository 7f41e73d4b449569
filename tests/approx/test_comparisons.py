from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvboost import ConfigError, KVBoost
from kvboost.approx import comparisons as subject
from kvboost.approx.calibration import Calibration, CalibrationRow
from kvboost.approx.select import CacheBlend
from tests.approx.test_find import HEAD, QUESTION, engine_for, text
from tests.helpers.models import tiny_model

Tiny = Callable[..., Any]


@pytest.fixture
def few_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "RATIOS", (0.0, 0.3, 1.0))


def traffic(count: int = 14, *, length: int = 96) -> list[list[int]]:
    """Prompts over a few documents in changing orders."""
    documents = [text(60 + i, length) for i in range(4)]
    prompts = []
    for n in range(count):
        order = [documents[(n + k * (1 + n % 3)) % 4] for k in range(3)]
        prompts.append([*HEAD, *(token for document in order for token in document), *text(90 + n, 12), *QUESTION])
    return prompts


@pytest.mark.usefixtures("few_ratios")
def test_the_smallest_ratio_that_is_good_enough_is_taken(tiny: Tiny, tmp_path: Path) -> None:
    engine = engine_for(tiny("llama", max_position_embeddings=1024), chunk_size=16)
    before = engine.cache_stats()["hot_chunks"]
    found = engine.calibrate(traffic(), save_to=tmp_path / "c.json", progress=False)
    assert engine.cache_stats()["hot_chunks"] == before, "calibrating must not fill the engine's own store"
    assert list(dict.fromkeys(row.strategy for row in found.rows)) == list(subject.TRIED)
    by_ratio = {row.ratio: row for row in found.rows if row.strategy == "auto"}
    assert by_ratio[1.0].compared >= 10
    assert by_ratio[1.0].differing == 0, "all rows repaired are a full reading"
    assert by_ratio[0.0].differing > 0, "on a random model no repair is not good enough"
    assert by_ratio[0.0].agreement <= by_ratio[1.0].agreement
    loaded = Calibration.load(tmp_path / "c.json")
    assert loaded == found
    for quality in (0.3, 0.9):  # fourteen prompts without a difference and four strategies show 0.23
        calibrated = engine_for(engine.model, chunk_size=16, quality=quality, calibration=tmp_path / "c.json")
        assert calibrated.parts is not None
        assert calibrated.session.prefiller.approx is not None
        chosen = found.choose(quality)
        assert chosen is not None
        repair = calibrated.session.prefiller.approx.repair_settings
        assert (repair.strategy.name, repair.ratio) == (chosen.strategy, chosen.ratio)
    assert found.choose(0.05) is None, "fourteen prompts cannot show that"


@pytest.mark.usefixtures("few_ratios")
def test_traffic_without_repetition_says_so(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"))
    with pytest.raises(ConfigError, match="none of the prompts repeat text of an earlier prompt"):
        engine.calibrate([text(i, 120) for i in range(3)], progress=False)
    with pytest.raises(ConfigError, match="no non-prefix reuse"):
        engine_for(tiny("gpt2")).calibrate(traffic(), progress=False)
    with pytest.raises(ConfigError, match="quality is exact"):
        engine_for(tiny("llama"), quality="exact").calibrate(traffic(), progress=False)


def _written(folder: Path, **changes: Any) -> Path:
    row = CalibrationRow("auto", ratio=0.2, compared=12, differing=3, agreement=0.9, typical_estimate=0.1)
    values: dict[str, Any] = {"weights": "w", "conditions": "", "rows": (row,)}
    file = folder / "calibration.json"
    Calibration(**{**values, **changes}).save(file)
    return file


def _fitting(engine: KVBoost) -> dict[str, str]:
    assert engine.parts is not None
    return {
        "weights": engine.parts.assembly.identity.snapshot().fields["weights"],
        "conditions": engine.session.prefiller.keys.conditions,
    }


def test_a_calibration_belongs_to_one_codec_and_one_kind_of_chunks(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=3)
    file = _written(tmp_path, **_fitting(engine_for(model)))
    for other in ({"kv_cache_bits": 8}, {"chunk_size": 16}):
        with pytest.raises(ConfigError, match="calibrate again with them"):
            engine_for(model, calibration=file, **other)
    with pytest.raises(ConfigError, match="leave one out"):
        engine_for(model, calibration=file, recompute_ratio=0.3)
    with pytest.raises(ConfigError, match="cannot be written to a file"):
        engine_for(model, recompute_strategy=CacheBlend(layer=0)).calibrate(traffic(), progress=False)


def test_a_calibration_belongs_to_one_model(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another model's weights"):
        KVBoost(tiny("llama"), None, calibration=_written(tmp_path), quality="high")


def test_a_calibration_that_found_nothing_moves_nothing(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=3)
    plain = engine_for(model)
    engine = engine_for(model, calibration=_written(tmp_path, **_fitting(plain)))
    stats = engine.cache_stats()["non_prefix_reuse"]
    assert not stats["allowed"]
    assert stats["reason"] is not None
    assert "no repair that changes at most 0.2 of the answers (the best is 0.475)" in stats["reason"]


def test_the_bound_is_clopper_and_pearsons() -> None:
    """By its definition; and a ratio that passes by luck below one that fails is not taken."""
    shown = ((0.1, 50, 0), (0.3, 50, 9), (0.5, 50, 1), (0.7, 50, 0))
    rows = [CalibrationRow("auto", ratio, n, k, 1.0, None) for ratio, n, k in shown]
    for row in rows:
        s = row.largest_share(0.9)
        as_few = sum(math.comb(50, i) * s**i * (1 - s) ** (50 - i) for i in range(row.differing + 1))
        assert as_few == pytest.approx(0.1, abs=1e-4)
    assert rows[0].largest_share(0.9) == pytest.approx(1 - 0.1 ** (1 / 50), abs=1e-5)
    chosen = Calibration("w", "", tuple(rows)).choose(0.08)
    assert chosen is not None
    assert chosen.ratio == 0.5
    assert Calibration("w", "", tuple(rows)).choose(0.01) is None


def test_of_several_strategies_the_one_that_recomputes_least_is_taken() -> None:
    """And each must be surer the more were tried: one of many passes by luck."""
    none = CalibrationRow("none", 0.0, 50, 9, 1.0, None)
    even = [CalibrationRow("even", ratio, 50, differing, 1.0, None) for ratio, differing in ((0.15, 1), (0.3, 0))]
    auto = [CalibrationRow("auto", ratio, 50, differing, 1.0, None) for ratio, differing in ((0.15, 5), (0.3, 0))]
    assert even[0].largest_share(0.9) == pytest.approx(0.0757, abs=1e-3)
    assert Calibration("w", "", (*even, *auto)).choose(0.08) == even[1], "95 % sure, not 90: at most 0.091"
    assert Calibration("w", "", tuple(even)).choose(0.08) == even[0]
    both = Calibration("w", "", (*even, *auto))
    assert both.confidence == pytest.approx(0.95)
    needed = both.prompts_needed(0.08)
    for count, enough in ((needed, True), (needed - 1, False)):
        assert (CalibrationRow("even", 0.15, count, 0, 1.0, None).largest_share(0.95) <= 0.08) is enough
    assert Calibration("w", "", (none, *auto, *even)).choose(0.12) == even[0]
    assert Calibration("w", "", (none, *auto, *even)).choose(0.5) == none


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99}', '{"format": 4, "rows": []}'])
def test_a_file_that_is_no_calibration_says_what_to_do(tmp_path: Path, content: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="calibrate"):
        Calibration.load(file)
    with pytest.raises(ConfigError, match="kvboost calibrate MODEL"):
        Calibration.load(tmp_path / "absent.json")


@pytest.mark.usefixtures("few_ratios")
def test_boundaries_are_cut_at_as_they_are_in_requests(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama", max_position_embeddings=1024), chunk_size=512)
    with pytest.raises(ConfigError, match="none of the prompts"):
        engine.calibrate(traffic(), progress=False)
    ends = [[len(HEAD) + 96 * k for k in range(4)]] * 14
    assert engine.calibrate(traffic(), boundaries=ends, progress=False).rows[0].compared >= 10
    with pytest.raises(ConfigError, match="1 lists of boundaries for 14 prompts"):
        engine.calibrate(traffic(), boundaries=ends[:1], progress=False)


@pytest.mark.usefixtures("few_ratios")
def test_a_repair_that_fails_is_no_comparison(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny("llama", max_position_embeddings=1024), chunk_size=16)
    monkeypatch.setattr("kvboost.approx.repair.Repairer.repair", lambda *args: 1 // 0)
    with pytest.warns(RuntimeWarning, match="repositioning chunks failed"), pytest.raises(ConfigError):
        engine.calibrate(traffic(), progress=False)
