"""vLLM's connector interface, passed on to the side that runs in this process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm.messages import Orders, Report
from kvboost.integrations.vllm.page_events import PageEvent
from kvboost.integrations.vllm.scheduler import SchedulerSide
from kvboost.integrations.vllm.setup import ends_at_once, make_setup
from kvboost.integrations.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

COUNTS = {
    "loaded_tokens": "Prompt tokens whose KV came from KVBoost's store instead of being computed.",
    "moved_tokens": "Prompt tokens whose KV was computed behind other text and re-rotated: approximate.",
    "computed_tokens": "Prompt tokens computed between moved ones, where nothing was found.",
    "recomputed_tokens": "Prompt tokens that were found behind other text and computed again, as a mean over layers.",
    "saved_tokens": "Tokens whose KV was put into KVBoost's store.",
    "refused_saves": "Saves that the store did not take: what comes before was evicted, or there was no room.",
    "failed_loads": "Loads that failed. Their tokens were computed.",
    "failed_saves": "Saves that failed. Their tokens are computed again next time.",
}
"""What the worker counts."""


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Counts on their way from a worker to the log and the metrics."""

    def reset(self) -> None:
        """Begin again."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: Any) -> Stats:
        """The sums: over steps for one worker, over workers for one step."""
        names = self.data.keys() | other.data.keys()
        return Stats(data={name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return {f"kvboost {name.replace('_', ' ')}": count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class Metrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus counters ``vllm:kvboost_loaded_tokens`` and so on."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, text in COUNTS.items():
            counter = self._counter_cls(f"vllm:kvboost_{name}", text, labelnames=labelnames)
            self._counters[name] = {index: counter.labels(*labels) for index, labels in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what happened since the last call."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


class KVBoostConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps the KV of a vLLM server in memory, on disk and in Redis.

    A model whose KV it cannot keep is served as without it; the log says why.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._refused: dict[int, int] = {}
        try:
            setup = make_setup(vllm_config, kv_cache_config, version=vllm.__version__)
        except UnsupportedModelError as error:
            _log.warning("kvboost: this model's KV is not kept: %s", error)
            return
        if role is KVConnectorRole.SCHEDULER:
            if setup.has_tiers and ends_at_once(vllm_config):
                _log.warning(
                    "kvboost: a server that is stopped loses KV that it has not written yet; start it with "
                    "--shutdown-timeout 30, and it writes first"
                )
            self._scheduler = SchedulerSide(setup)
        else:
            self._worker = WorkerSide(setup)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not kept is computed again."""
        return False

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The pages of all layers."""
        if self._worker is None:
            return
        try:
            self._worker.register(self._vllm_config.compilation_config.static_forward_context, kv_caches)
        except UnsupportedModelError as error:
            _log.warning("kvboost: this model's KV is not kept: %s", error)
            self._worker.close()
            self._worker = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Write what this step's requests were promised."""
        if self._worker is not None:
            self._worker.begin(self._orders())
        else:  # the scheduler's side may not know why this side keeps nothing
            self._refused = {fetch.number: 0 for fetch in self._orders().fetches}

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: pages are written before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing yet: pages are read once the step is through."""

    def wait_for_save(self) -> None:
        """Keep what the step has computed."""
        if self._worker is not None:
            self._worker.end(self._orders())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages to compute after all."""
        return self._worker.failed_pages() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Report | None:
        """What the scheduler's side needs to know."""
        if self._worker is not None:
            return self._worker.report()
        return Report(held=self._refused) if self._refused else None

    def get_kv_connector_stats(self) -> Stats | None:
        """Counts since the last call."""
        counts = self._worker.drain_counts() if self._worker is not None else {}
        return Stats(data=counts) if counts else None

    def shutdown(self) -> None:
        """Write what waits."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        self._scheduler = self._worker = None

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    # In the scheduler

    def on_new_request(self, request: Any) -> None:
        """Begin to look for it."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded; written before the step's forward."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has pages now."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The workers' orders."""
        return self._scheduler.orders(scheduler_output) if self._scheduler is not None else Orders()

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers' report."""
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(report, Report):
            self._scheduler.learn(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its pages are free at once: what was worth keeping has been read."""
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished`."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Find nothing of what was stored before, until the server is restarted."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """What the tiers have gained and lost, for vLLM's own publisher of KV events."""
        found = self._scheduler.take_events() if self._scheduler is not None else []
        return [_event_of(event, self._vllm_config.cache_config.block_size) for event in found]

    # Of the class

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Counts as they come from another process."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Metrics:
        """Prometheus counters."""
        return Metrics(*args)


def _event_of(event: PageEvent, block_size: int) -> KVCacheEvent:
    """As vLLM has it. The medium is one of those that vLLM knows; ``ownership`` names the tier."""
    medium = MEDIUM_CPU if event.tier == "memory" else MEDIUM_STORAGE
    where = {"medium": medium, "group_idx": 0, "locality": "LOCAL", "ownership": f"kvboost-{event.tier}"}
    hashes = [maybe_convert_block_hash(page) for page in event.hashes]
    if not event.is_stored:
        return BlockRemoved(block_hashes=hashes, **where)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=maybe_convert_block_hash(event.parent) if event.parent is not None else None,
        token_ids=event.tokens,
        block_size=block_size,
        lora_id=event.lora.adapter_id if event.lora is not None else None,
        lora_name=event.lora.name if event.lora is not None else None,
        **where,
    )
