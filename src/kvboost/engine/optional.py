"""The packages an engine works without: non-prefix reuse and KV paging.

Used by the assembly. Invariant: with ``kvboost.approx`` or ``kvboost.offload.kv`` deleted, exact reuse still works and
the missing package is reported. They are imported only if a setting needs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost.config import EngineConfig
from kvboost.core.non_prefix import NonPrefixReuse
from kvboost.core.session import KVPaging
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.approx.setup import ApproxSettings


def approx_settings(
    config: EngineConfig, *, weights: str, family: str, conditions: str
) -> ApproxSettings | NonPrefixReuse:
    """The settings for a model with these weights, ``model_type``, codec and chunking; off is what finds none."""
    if config.quality == "exact" and config.calibration is None:
        return NonPrefixReuse()
    try:
        from kvboost.approx import setup
    except ModuleNotFoundError as error:
        return NonPrefixReuse(f"the package {error.name} is not installed")
    return setup.approx_settings(config, weights=weights, family=family, conditions=conditions)


def check_approx_settings(config: EngineConfig) -> None:
    """Raise ConfigError for settings that cannot work with any model."""
    try:
        from kvboost.approx import setup
    except ModuleNotFoundError:
        return  # reported when the engine is made
    setup.check_approx_settings(config)


def make_paging(model: Any, *, budget: int, directory: Path | None) -> tuple[KVPaging | None, str | None]:
    """Paging for this model, or None and the reason."""
    try:
        from kvboost.offload.kv import prefill
    except ModuleNotFoundError as error:
        raise ConfigError(f"kv_bytes needs the package {error.name}, which is not installed; leave it out") from error
    return prefill.make_paging(model, budget=budget, directory=directory)
