"""Settings of the connector."""

from __future__ import annotations

import pytest

from kvboost.errors import ConfigError
from kvboost.integrations.vllm.place import connector_config


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
