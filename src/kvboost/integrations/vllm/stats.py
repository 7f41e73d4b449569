"""Counts of the worker, for vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

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
