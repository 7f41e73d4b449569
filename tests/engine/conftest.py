from __future__ import annotations

import pytest

from kvboost.engine.reader import PromptReader


@pytest.fixture
def prices_as_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether moving pays is decided by the first guess: a busy machine must not decide a test."""
    monkeypatch.setattr(PromptReader, "_observe", lambda self, reading: None)
