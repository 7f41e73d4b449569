"""Settings of the connector."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvboost.errors import ConfigError
from kvboost.integrations.vllm import setup
from kvboost.integrations.vllm.setup import Setup, connector_config, ends_at_once


def test_defaults_are_exact_and_in_memory() -> None:
    config = connector_config({})
    assert (config.mode, config.recompute_ratio) == ("exact", 0.15)
    assert config.engine.cache_bytes == 4 * 2**30


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"disk_dir": "x"}, "did you mean disk_cache_dir"),
        ({"quality": "fast"}, "is not a setting of KVBoostConnector"),
        ({"mode": "fast"}, "use one of exact, approximate, off"),
        ({"recompute_ratio": 15}, "is not a share"),
        ({"remote_url": "http://x"}, "give redis://"),
    ],
)
def test_a_wrong_setting_says_what_to_do(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        connector_config(extra)


@pytest.mark.parametrize("memory", [True, False])
def test_who_only_looks_gives_no_memory_to_a_fleet(monkeypatch: pytest.MonkeyPatch, memory: bool) -> None:
    given: list[str] = []

    def stores(config: Any, **_: object) -> Any:
        given.append(config.remote_url)
        return SimpleNamespace(open=lambda tenant, root: None)

    monkeypatch.setattr(setup, "Stores", stores)
    nothing: Any = SimpleNamespace(namespace=lambda: b"")
    url = "mooncake://host:1?protocol=rdma"
    config = connector_config({"remote_url": f"{url}&segment=1GiB"})
    Setup(config, [], 16, nothing, nothing, nothing, nothing).open(memory=memory)
    assert given == [f"{url}&segment=1GiB" if memory else url]


@pytest.mark.parametrize(("timeout", "processes", "lost"), [(0, "1", True), (30, "1", False), (0, "0", False)])
def test_who_is_ended_at_once_cannot_write(
    monkeypatch: pytest.MonkeyPatch, timeout: int, processes: str, lost: bool
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", processes)
    assert ends_at_once(SimpleNamespace(shutdown_timeout=timeout)) is lost
    assert not ends_at_once(SimpleNamespace())  # a version that has no such setting
