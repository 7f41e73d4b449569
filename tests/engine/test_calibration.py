from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvboost import ConfigError, KVBoost
from kvboost.engine import calibration as subject
from kvboost.repair import Calibration
from tests.engine.test_moving import HEAD, QUESTION, engine_for, text
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
    found = engine.calibrate(traffic(), tolerated=0.05, save_to=tmp_path / "c.json", progress=False)
    assert engine.cache_stats()["hot_chunks"] == before, "calibrating must not fill the engine's own store"
    assert found.compared >= 10
    by_ratio = {row.ratio: row for row in found.measured}
    assert by_ratio[1.0].differing == 0.0, "all rows repaired are a full reading"
    assert by_ratio[0.0].differing > 0.05, "on a random model no repair is not good enough"
    assert by_ratio[0.0].agreement <= by_ratio[1.0].agreement
    assert found.ratio == next(row.ratio for row in found.measured if row.differing <= 0.05)
    loaded = Calibration.load(tmp_path / "c.json")
    assert loaded == found
    calibrated = engine_for(engine.model, chunk_size=16, calibration=tmp_path / "c.json")
    assert calibrated._parts is not None
    assert calibrated._parts.moving is not None
    assert calibrated._parts.moving.repair_settings.ratio == found.ratio


@pytest.mark.usefixtures("few_ratios")
def test_traffic_without_repetition_says_so(tiny: Tiny) -> None:
    engine = engine_for(tiny("llama"))
    with pytest.raises(ConfigError, match="only 0 of the prompts hold text that an earlier one had elsewhere"):
        engine.calibrate([text(i, 120) for i in range(3)], progress=False)
    with pytest.raises(ConfigError, match="moves no chunks"):
        engine_for(tiny("gpt2")).calibrate(traffic(), progress=False)
    with pytest.raises(ConfigError, match="quality is exact"):
        engine_for(tiny("llama"), quality="exact").calibrate(traffic(), progress=False)


def _written(folder: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "weights": "w",
        "strategy": "auto",
        "ratio": 0.2,
        "tolerated_error": 0.1,
        "tolerated_share": 0.05,
        "compared": 12,
        "measured": (),
    }
    file = folder / "calibration.json"
    Calibration(**{**values, **changes}).save(file)
    return file


def test_a_calibration_belongs_to_one_model(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another model's weights"):
        KVBoost(tiny("llama"), None, calibration=_written(tmp_path))


def test_a_calibration_that_found_nothing_moves_nothing(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=3)
    plain = engine_for(model)
    assert plain._parts is not None
    engine = engine_for(model, calibration=_written(tmp_path, weights=plain._parts.weights, ratio=None))
    stats = engine.cache_stats()["moved_reuse"]
    assert not stats["allowed"]
    assert stats["reason"] is not None
    assert "more than 5% of" in stats["reason"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "measured": []}'])
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
    with pytest.raises(ConfigError, match="only 0 of the prompts"):
        engine.calibrate(traffic(), progress=False)
    ends = [[len(HEAD) + 96 * k for k in range(4)]] * 14
    assert engine.calibrate(traffic(), boundaries=ends, tolerated=0.05, progress=False).compared >= 10
    with pytest.raises(ConfigError, match="1 lists of boundaries for 14 prompts"):
        engine.calibrate(traffic(), boundaries=ends[:1], progress=False)
