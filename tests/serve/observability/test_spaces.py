from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.serve.observability import spaces


def test_the_model_of_a_tenant_is_looked_at_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def namespace() -> bytes:
        nonlocal looks
        looks += 1
        return bytes([looks]) * 32

    keys = SimpleNamespace(keys=SimpleNamespace(namespace=namespace))
    view = SimpleNamespace(config=SimpleNamespace(tenant="t"), session=SimpleNamespace(prefiller=keys))
    engine: Any = SimpleNamespace(views=lambda: [view])
    listed = spaces.Spaces(engine).listed
    assert [listed()[0]["model"] for _ in range(3)] == ["01" * 6] * 3
    monkeypatch.setattr(spaces, "_MODEL_S", 0.0, raising=False)
    assert listed()[0]["model"] == "02" * 6, "the model was changed meanwhile"
