"""What both sides of the connector derive from a vLLM server's configuration, and how a request is served.

Read by both sides when they are made. Invariant: every process of a server derives the same.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvboost.config import AUTO, EngineConfig
from kvboost.core.chunking import chunk_size_for, make_chunker
from kvboost.core.costs import CostModel
from kvboost.engine.stores import Stores
from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.extend import Chunker, ChunkStore
from kvboost.hf.breaks import break_table
from kvboost.hf.cache import KVLayout, TensorSpec
from kvboost.hf.codec import KVCodec, codec_for
from kvboost.integrations.vllm.identity import RequestKeys, model_fields
from kvboost.store import key_salt
from kvboost.store.tiers.mooncake import giving_nothing

_log = logging.getLogger(__name__)
_DEFAULT_BYTES = 4 * 2**30
_OWN = (
    "cache_bytes",
    "chunk_size",
    "disk_cache_bytes",
    "disk_cache_dir",
    "record_key_file",
    "record_protection",
    "remote_timeout_seconds",
    "remote_ttl_seconds",
    "remote_url",
    "tenant",
    "tenant_bytes",
)
"""Settings of an engine that the connector takes too, with the same meaning."""
MODES = ("exact", "approximate", "off")
OPTION = "kvboost"
"""In a request's ``kv_transfer_params``: ``{"kvboost": "off"}`` neither reads nor writes the store; ``"exact"`` and
``"approximate"`` are the others."""
_RATIO = 0.15
_PATIENCE_S = 1.0
"""For a remote server that is slow to answer: threads of the connector wait, while vLLM runs other requests."""


@dataclass(frozen=True)
class ConnectorConfig:
    """What ``kv_connector_extra_config`` says."""

    engine: EngineConfig
    mode: str = "exact"
    """For requests that do not say: one of :data:`MODES`."""
    recompute_ratio: float = _RATIO
    """Share of moved tokens that is recomputed."""


def connector_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """The settings in ``kv_connector_extra_config``. Raises ConfigError for one that is none."""
    own = (*_OWN, "mode", "recompute_ratio")
    for name in extra:
        if name not in own:
            near = difflib.get_close_matches(name, own, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(own)}"
            raise ConfigError(f"{name} is not a setting of KVBoostConnector; {hint}")
    mode, ratio = extra.get("mode", "exact"), extra.get("recompute_ratio", _RATIO)
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r} is not known; use one of {', '.join(MODES)}")
    if not isinstance(ratio, int | float) or not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"recompute_ratio={ratio!r} is not a share; give 0.15 for 15 % of the tokens")
    own_settings = {name: value for name, value in extra.items() if name in _OWN}
    engine = EngineConfig(**{"remote_timeout_seconds": _PATIENCE_S, **own_settings})
    engine = replace(
        engine,
        cache_bytes=_DEFAULT_BYTES if engine.cache_bytes == AUTO else engine.cache_bytes,
        host_cache_bytes=0,  # the memory store is in host memory already
    )
    return ConnectorConfig(engine, mode, float(ratio))


@dataclass(frozen=True)
class Setup:
    """What both sides of a connector derive alike from a server's configuration."""

    settings: ConnectorConfig
    layers: list[str]
    block_size: int
    layout: KVLayout
    codec: KVCodec
    chunker: Chunker
    keys: RequestKeys
    has_events: bool = False
    """Whether vLLM publishes KV events."""
    may_wait: bool = False
    """Whether nobody else is held up by a step without work that waits."""

    def open(self, *, memory: bool) -> ChunkStore:
        """The worker's store; without ``memory`` only to look into the tiers below."""
        config = self.settings.engine
        if not memory:
            remote = giving_nothing(config.remote_url) if config.remote_url is not None else None
            config = replace(config, cache_bytes=0, remote_url=remote)
        stores = Stores(config, layout=self.layout, codec=self.codec, costs=CostModel(), repaired_share=0.0)
        return stores.open(config.tenant, root=self.keys.namespace())

    @property
    def spec(self) -> TensorSpec:
        """The shape of each layer's keys, and of its values."""
        return self.layout.slots[0]

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything below the worker's memory."""
        config = self.settings.engine
        return config.disk_cache_dir is not None or config.remote_url is not None


def make_setup(vllm_config: Any, kv_cache_config: Any, *, version: str) -> Setup:
    """Raises UnsupportedModelError for a server whose pages cannot be kept, and ConfigError for bad settings."""
    settings = connector_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
    config = settings.engine
    parallel = vllm_config.parallel_config
    workers = parallel.world_size * getattr(parallel, "decode_context_parallel_size", 1)
    if workers != 1:
        # Workers would have to agree on what all of them hold before a claim, and on the positions of a repair.
        raise UnsupportedModelError(f"it runs on {workers} workers; KV is kept for one")
    layers, spec = _only_group(kv_cache_config)
    kind = TensorSpec(spec.num_kv_heads, spec.head_size, spec.dtype, torch.device("cpu"))
    layout = KVLayout((kind,) * (2 * len(layers)))
    if config.chunk_size is None:
        config = replace(config, chunk_size=chunk_size_for(layout.bytes_per_token))
    chunker = make_chunker("natural", size=config.chunk_tokens, breaks=_breaks(vllm_config.model_config))
    codec = codec_for(config.kv_cache_bits, layout)
    block_size = vllm_config.cache_config.block_size
    fields = model_fields(vllm_config, block_size=block_size, version=version)
    salt = key_salt(config.record_key_file)
    keys = RequestKeys(fields, chunker=chunker, tenant=config.tenant, codec=codec.name, key_salt=salt)
    events = vllm_config.kv_events_config
    has_events = events is not None and bool(events.enable_kv_cache_events)
    # With asynchronous scheduling another step may be under way, and ranks of data parallelism step together.
    may_wait = not vllm_config.scheduler_config.async_scheduling and parallel.data_parallel_size == 1
    settings = replace(settings, engine=config)
    return Setup(settings, layers, block_size, layout, codec, chunker, keys, has_events, may_wait)


def mode_of(request: Any, default: str) -> str:
    """How a request is served: its own wish, the server's default, or off if more than its tokens decide its KV."""
    plain = request.prompt_token_ids is not None and request.prompt_embeds is None and not request.mm_features
    if not plain or request.pooling_params is not None:
        return "off"
    wish = (request.kv_transfer_params or {}).get(OPTION, default)
    if wish not in MODES:
        _log.warning("kvboost: %r is not a mode; the request is served without us; use %s", wish, ", ".join(MODES))
        return "off"
    return str(wish)


def ends_at_once(vllm_config: Any) -> bool:
    """Whether vLLM kills its engine's process when the server is stopped, so that nothing more is written."""
    return os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0" and getattr(vllm_config, "shutdown_timeout", 1) == 0


def _only_group(kv_cache_config: Any) -> tuple[list[str], Any]:
    """The layers of the model, which must all have full attention and unquantised KV of one shape."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedModelError(f"it has {len(groups)} kinds of KV cache; only one kind can be kept")
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ != "FullAttentionSpec" or spec.sliding_window or spec.attention_chunk_size:
        raise UnsupportedModelError(f"its KV cache is {type(spec).__name__}; only full attention can be kept")
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16) or spec.page_size_bytes != (
        2 * spec.block_size * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    ):
        raise UnsupportedModelError("its KV cache is quantised; leave kv_cache_dtype at auto")
    return list(groups[0].layer_names), spec


def _breaks(model: Any) -> Any:
    """Where texts have natural ends; None if the tokenizer cannot be loaded, which only makes chunks worse."""
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        return break_table(cached_tokenizer_from_config(model))
    except (OSError, ValueError, TypeError) as error:
        _log.warning("kvboost: no tokenizer for natural chunks (%s); chunks are cut by content", error)
        return None
