"""KVBoost's tiers for vLLM: ``--kv-transfer-config '{"kv_connector": "KVBoostConnector", "kv_role": "kv_both"}'``.

vLLM loads :func:`register` through the entry point ``vllm.general_plugins``. Nothing here imports vLLM before that.
"""

from __future__ import annotations

from contextlib import suppress

_NAME = "KVBoostConnector"


def register() -> None:
    """Make the connector known to vLLM by its name. Safe to call again: vLLM does so in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector(_NAME, f"{__name__}.connector", _NAME)
