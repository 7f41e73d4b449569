"""Settings are checked once, and every message says what to write instead."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.config import EngineConfig, parse_bytes
from kvboost.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("17", 17),
        ("17b", 17),
        ("2GB", 2 * 10**9),
        ("2GiB", 2 * 2**30),
        ("500 MB", 500 * 10**6),
        (" 1.5 gib ", 3 * 2**29),
        ("64KiB", 65536),
        ("3kb", 3000),
        ("7mib", 7 * 2**20),
    ],
)
def test_sizes_in_words(text: str, expected: int) -> None:
    assert parse_bytes(text, name="cache_bytes") == expected


@given(st.integers(0, 2**50))
def test_sizes_in_numbers(number: int) -> None:
    assert parse_bytes(number, name="cache_bytes") == number
    assert parse_bytes(str(number), name="cache_bytes") == number


@pytest.mark.parametrize("bad", ["", "GB", "2XB", "two", "1e9", "-1", "1 2", "2GB!", -1])
def test_what_is_no_size_is_named(bad: Any) -> None:
    with pytest.raises(ConfigError, match="workspace_bytes="):
        parse_bytes(bad, name="workspace_bytes")


def test_defaults_are_valid_and_sizes_become_numbers() -> None:
    config = EngineConfig()
    assert (config.cache_bytes, config.workspace_bytes, config.host_cache_bytes, config.kv_bytes) == (
        *["auto"] * 3,
        None,
    )
    assert (config.chunk_size, config.chunking, config.strict, config.max_chunks) == (None, "natural", True, None)
    assert (config.quality, config.numerics) == ("exact", None)  # nothing is repositioned that was not asked for
    assert EngineConfig(cache_bytes=0).cache_bytes == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"chunk_size": 3},
        {"chunk_size": 0},
        {"chunk_size": -128},
        {"max_chunks": -1},
        {"cache_bytes": -1},
        {"cache_bytes": "lots"},
        {"workspace_bytes": "-5"},
        {"recompute_ratio": 1.01},
        {"recompute_ratio": -0.1},
        {"quality": "perfect"},
        {"quality": 2.0},
        {"quality": 1.0},
        {"quality": None},
        {"shadow_share": "0.1"},
        {"quality": -0.1},
        {"kv_cache_bits": 5},
        {"numerics": "quick"},
        {"disk_cache_bytes": "much"},
        {"disk_cache_bytes": 0},
        {"remote_url": "http://example"},
        {"remote_timeout_seconds": 0},
        {"remote_timeout_seconds": "1"},
        {"tenant_bytes": -1},
        {"tenant": None},
        {"record_protection": "rot13"},
        {"record_protection": "mac"},
        {"record_key_file": "key"},
    ],
    ids=lambda bad: "-".join(bad),
)
def test_a_bad_setting_is_named(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ConfigError, match=f"^{name}="):
        EngineConfig(**bad)


@pytest.mark.parametrize(
    "idle",
    [
        {"recompute_strategy": "even"},
        {"recompute_ratio": 0.0},
        {"force_approx": True},
        {"calibration": "file.json"},
        {"shadow_share": 0.5},
        {"force_approx": True, "recompute_ratio": 0.3},
    ],
    ids=lambda idle: "-".join(idle),
)
def test_settings_of_non_prefix_reuse_need_a_quality(idle: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="never uses; add quality='auto'") as error:
        EngineConfig(**idle)
    assert all(name in str(error.value) for name in idle)
    for quality in ("auto", "high", "fast", 0.02):
        assert EngineConfig(quality=quality, **idle).quality == quality


def test_auto_without_checks_could_never_be_earned() -> None:
    with pytest.raises(ConfigError, match="earned by checks, and shadow_share=0 makes none; leave shadow_share out"):
        EngineConfig(quality="auto", shadow_share=0.0)
    with pytest.raises(ConfigError, match="never uses"):
        EngineConfig(shadow_share=0.0)
    assert EngineConfig(quality="auto", shadow_share=0.0, calibration="file.json").checked_share == 0.0
    assert EngineConfig(quality="high", shadow_share=0.0).checked_share == 0.0


def test_the_limits_themselves_are_allowed() -> None:
    assert EngineConfig(chunk_size=4, max_chunks=0, cache_bytes=0, workspace_bytes=0).chunk_size == 4


def test_unknown_settings_and_late_changes_raise() -> None:
    with pytest.raises(TypeError, match="chunk_sise"):
        EngineConfig(chunk_sise=64)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        EngineConfig(True)  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        EngineConfig().chunk_size = 64  # type: ignore[misc]


def test_a_config_error_is_a_value_error() -> None:
    """So that a caller who knows nothing of this package can catch it."""
    assert issubclass(ConfigError, ValueError)
