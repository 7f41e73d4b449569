"""vLLM with its prefix cache, alone or with KVBoost's connector, in one process."""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import count
from typing import Any

from .protocol import Answer, Clock

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its second process would keep a core busy while others are timed
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_PAGE = 32
_CONNECTOR = "kvboost.integrations.vllm.connector"


class VLLM:
    """One engine, stepped by hand, so that the first token is seen when it is there."""

    def __init__(self, settings: dict[str, Any], *, connector: bool) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = None
        if connector:
            if find_spec(_CONNECTOR) is None:  # say so before the engine is made
                raise ModuleNotFoundError(name=_CONNECTOR)
            transfer = KVTransferConfig(
                kv_connector="KVBoostConnector",
                kv_connector_module_path=_CONNECTOR,
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
            )
        longest = settings["max_tokens"]
        self._llm = LLM(
            model=settings["model"],
            dtype=settings.get("dtype", "auto"),
            block_size=_PAGE,
            max_model_len=longest,
            max_num_batched_tokens=longest,
            max_num_seqs=4,
            enforce_eager=True,
            enable_prefix_caching=True,
            kv_transfer_config=transfer,
        )
        self._connector = connector
        self._names = count()
        self.versions = {"vllm": vllm.__version__}
        # Its "auto" is not the checkpoint's: float32 becomes bfloat16.
        self.dtype = str(self._llm.llm_engine.vllm_config.model_config.dtype).rpartition(".")[2]

    def generate(self, order: dict[str, Any], clock: Clock) -> Answer:
        """Step until the request is done. With the connector, text that moves may be reused approximately."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        approximate = self._connector and bool(order.get("moves"))
        extra = {"kv_transfer_params": {"kvboost": "approximate"}} if approximate else None
        sampling = SamplingParams(temperature=0, max_tokens=order["new"], extra_args=extra)
        engine, tokens, cached = self._llm.llm_engine, [], 0
        engine.add_request(str(next(self._names)), TokensPrompt(prompt_token_ids=order["tokens"]), sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                cached = output.num_cached_tokens or cached
                if tokens:
                    clock.token()
        return Answer(tokens, cached=cached)

    def forget(self) -> None:
        """Drop its pages, and what the connector has."""
        self._llm.reset_prefix_cache(**({"reset_connector": True} if self._connector else {}))

    def close(self) -> None:
        """End the engine's core."""
        self._llm.llm_engine.engine_core.shutdown()


def make(name: str, settings: dict[str, Any]) -> VLLM:
    """With or without the connector."""
    return VLLM(settings, connector=name == "vllm-kvboost")
