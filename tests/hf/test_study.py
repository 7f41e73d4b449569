"""Making an engine is not silent where it takes long."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from kvboost.hf import study
from tests.helpers.models import tiny_model


@pytest.mark.parametrize("seconds", [0.0, 1.2])
def test_a_bar_is_shown_once_it_takes_over_a_second(
    seconds: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = study.probe_model

    def slow(model: Any) -> Any:
        time.sleep(seconds)
        return probe(model)

    monkeypatch.setattr(study, "probe_model", slow)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    found = study.study_model(tiny_model("llama").eval(), numerics=None)
    assert found.identity.snapshot().fields["numerics"].endswith(found.numerics.spec)
    shown = capsys.readouterr().err
    assert ("testing how its kernels round (1 of 3" in shown) == (seconds > 1)
