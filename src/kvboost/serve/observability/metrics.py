"""What a server counts: Prometheus metrics, in a registry of its own, its last requests, and what the cache holds.

Counted by :class:`kvboost.serve.generation.service.Service` and the request log, read by /metrics, /ready and
/v1/cache. Nobody who looks at it waits for a disk or a server: numbers of the memory and counters are those of now;
what tiers below the memory hold is as old as the last look. Invariants: labels take few values, none of them from a
client, so nobody can grow them; no word of a prompt is kept; tiers are asked by one thread only, and less often the
longer they take.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvboost.engine import KVBoost
from kvboost.scheduler.runner import BatchRunner
from kvboost.types import CacheStats

_MIN_PERIOD_S = 10.0
_SHARE = 0.05  # of the time may be spent on asking
_CLOSE_S = 5.0  # a tier that hangs must not keep the process

_log = logging.getLogger("kvboost.serve")


class KeptStats:
    """Asks the tiers of one engine what they hold, again and again. Thread-safe."""

    def __init__(self, engine: KVBoost) -> None:
        self._engine = engine
        self._ended = threading.Event()
        self._due = threading.Event()
        self._thread: threading.Thread | None = None
        if engine.tier_states():  # otherwise there is nothing to ask
            self._thread = threading.Thread(target=self._keep, name="kvboost-statistics", daemon=True)
            self._thread.start()

    def look_again(self) -> None:
        """What the tiers hold has changed much: ask them soon."""
        self._due.set()

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _keep(self) -> None:
        while not (self._ended.is_set() or self._engine.parts.closed):
            began = time.monotonic()
            self._due.clear()
            try:
                total_stats(self._engine)
            except Exception:  # noqa: BLE001 - the thread must go on: numbers are old until it works again
                _log.warning("the tiers could not be asked what they hold", exc_info=True)
            if self._ended.is_set():
                return
            self._due.wait(max(_MIN_PERIOD_S, (time.monotonic() - began) / _SHARE))


def total_stats(engine: KVBoost, *, ask_tiers: bool = True) -> CacheStats:
    """The engine's statistics, with those of its tenants added. Without ``ask_tiers`` this does no I/O."""
    opened = engine.views()
    views = [view.cache_stats(ask_tiers=ask_tiers) for view in opened]
    total = CacheStats(**views[0])
    guarded = [view.session.prefiller.store.errors for view in opened if view.session is not None]
    # What tiers swallow is counted once for all tenants, so it cannot be summed over them.
    total["store_errors"] = sum(guarded) + sum(tier.work.errors for tier in engine.tier_states().values())
    by_tier = dict(total["bytes_by_tier"])
    for stats in views[1:]:
        total["approximate_hits"] += stats["approximate_hits"]
        if not engine.parts.owns_store:
            # A store that was given is one for all tenants. Only the split of its misses is each tenant's own.
            total["cache_misses"] -= stats["approximate_hits"]
            continue
        total["hot_chunks"] += stats["hot_chunks"]
        total["hot_memory_mb"] += stats["hot_memory_mb"]
        total["cache_hits"] += stats["cache_hits"]
        total["cache_misses"] += stats["cache_misses"]
        total["evictions"] += stats["evictions"]
        total["leased_chunks"] += stats["leased_chunks"]
        total["unsaved_chunks"] += stats["unsaved_chunks"]
        for tier, held in stats["bytes_by_tier"].items():
            by_tier[tier] = by_tier.get(tier, 0) + held  # each tenant counts its own, in every tier
    total["bytes_by_tier"] = by_tier
    found = total["cache_hits"] + total["approximate_hits"]
    looked_up = found + total["cache_misses"]
    total["hit_rate"] = found / looked_up if looked_up else 0.0
    total["exact_hit_rate"] = total["cache_hits"] / looked_up if looked_up else 0.0
    return total


_WORK = {
    "loads": "Loads, of one or more chunks each.",
    "load_seconds": "Time spent on loads.",
    "hits": "Chunks that came from there.",
    "misses": "Chunks that were expected there and did not come.",
    "loads_declined": "Chunks that were computed, as loading was expected to take longer.",
    "writes_dropped": "Blocks not written, as too much waited to be written.",
    "refused": "Blocks the tier did not take: it was full, out of reach, or lacks what comes before.",
    "errors": "Failures, treated as misses.",
}
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_MAX_RECENT = 60


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """What one request computed and reused. Token counts are of its prompt, except ``new``."""

    id: str
    endpoint: str
    at: float
    """Seconds since 1970, when it ended."""
    prompt: int
    """All of them. Where they came from is not known of an answer that was cancelled: the next four are 0 then."""
    exact: int
    moved: int
    """The recomputed ones included."""
    recomputed: int
    fresh: int
    new: int
    ttft_ms: float | None
    total_ms: float
    saved_ms: float
    """What computing the reused tokens would have taken, as the engine expects from its recent requests."""
    finish: str
    reason: str | None
    """Why something was not reused."""
    queue_ms: float | None = None
    """Until the first job was admitted."""
    token_ms: float | None = None
    """For each token after the first; None where there is one at most."""


class _Live(Collector):
    """The engine's and the runner's own numbers, taken at each scrape."""

    def __init__(self, engine: KVBoost, runner: BatchRunner) -> None:
        self._engine, self._runner = engine, runner
        self._lock = threading.Lock()
        self._last: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self._gone: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def _risen(self, *name: str, value: float) -> float:
        """A counter's sum over the tenants that are here, and what it had of those whose keys were revoked since."""
        with self._lock:
            self._gone[name] += max(0.0, self._last[name] - value)
            self._last[name] = value
            return value + self._gone[name]

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        stats, load = total_stats(self._engine, ask_tiers=False), self._runner.load()
        reuse = stats["non_prefix_reuse"]
        for name, meaning, value in (
            ("kvboost_runner_alive", "0 once the runner has failed or hangs.", load.alive),
            ("kvboost_runner_step_seconds", "Since the step that runs began; 0 if none runs.", load.step_seconds),
            ("kvboost_jobs_running", "Jobs in the batch.", load.running),
            ("kvboost_jobs_waiting", "Jobs that wait.", load.waiting),
            ("kvboost_jobs_kv_bytes", "KV held by running jobs.", load.cached_bytes),
            ("kvboost_jobs_one_by_one", "1 if jobs are decoded one by one; the log says why.", load.one_by_one),
            ("kvboost_store_chunks", "Chunks in memory.", stats["hot_chunks"]),
            ("kvboost_store_leased", "Chunks held against eviction at the moment.", stats["leased_chunks"]),
            # Gauges, as a new trial begins at 0.
            ("kvboost_non_prefix_allowed", "1 if requests may use non-prefix reuse.", reuse["allowed"]),
            ("kvboost_non_prefix_checked", "Answers checked, of the repair on trial or in use.", reuse["checked"]),
            ("kvboost_non_prefix_differed", "Those of them that it changed.", reuse["differing"]),
        ):
            yield GaugeMetricFamily(name, meaning, value=value)
        for name, meaning, value in (
            ("kvboost_jobs_preempted", "Running jobs moved back to the queue.", load.preempted),
            ("kvboost_chunk_hits", "Chunks found as they were.", stats["cache_hits"]),
            ("kvboost_chunk_moved", "Chunks found by non-prefix reuse.", stats["approximate_hits"]),
            ("kvboost_chunk_misses", "Chunks not found.", stats["cache_misses"]),
            ("kvboost_chunk_evictions", "Chunks evicted.", stats["evictions"]),
            ("kvboost_store_errors", "Failures of the store and its tiers.", stats["store_errors"]),
        ):
            yield CounterMetricFamily(name, meaning, value=self._risen(name, value=value))
        kept = "KV kept for later, by tier, of the tenants that were here since the start; others may have more there."
        by_tier = GaugeMetricFamily("kvboost_store_bytes", kept, labels=["tier"])
        for tier, held in stats["bytes_by_tier"].items():
            by_tier.add_metric([tier], held)
        yield by_tier
        yield from self._tiers()

    def _tiers(self) -> Iterator[Metric]:
        tiers = self._engine.tier_states()
        available = GaugeMetricFamily("kvboost_tier_available", "1 if it answers.", labels=["tier"])
        for name, tier in tiers.items():
            available.add_metric([name], tier.available)
        yield available
        for field, meaning in _WORK.items():
            family = CounterMetricFamily(f"kvboost_tier_{field}", meaning, labels=["tier"])
            for name, tier in tiers.items():
                family.add_metric([name], self._risen(field, name, value=getattr(tier.work, field)))
            yield family


class Metrics:
    """Counters and histograms of requests, and the engine's own. Thread-safe."""

    def __init__(self, engine: KVBoost, runner: BatchRunner) -> None:
        self._recent: deque[RequestRecord] = deque(maxlen=_MAX_RECENT)
        self._registry = CollectorRegistry()
        self._registry.register(_Live(engine, runner))
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry, buckets=_SECONDS)
        self._requests = counter("kvboost_requests", "Answers, by endpoint and how they ended.", ["endpoint", "finish"])
        self._responses = counter("kvboost_http_responses", "Responses by status.", ["status"])
        self._prompt = counter("kvboost_prompt_tokens", "Prompt tokens, by where their KV came from.", ["source"])
        self._saved = counter("kvboost_saved_seconds", "Time to compute the reused tokens, as expected.")
        self._new = counter("kvboost_new_tokens", "Tokens produced.")
        self._ttft = histogram("kvboost_ttft_seconds", "From submission to the first token.")
        self._total = histogram("kvboost_request_seconds", "Whole answers.")
        self._queue = histogram("kvboost_queue_seconds", "From submission until a job was admitted.")
        mean = "For each token after the first, on average over an answer."
        self._token = histogram("kvboost_output_token_seconds", mean, buckets=_TOKEN_SECONDS)
        self._pins = counter(
            "kvboost_client_pins", "Lifetimes that clients asked for, by whether they got them.", ["outcome"]
        )
        for source in ("exact", "moved", "recomputed", "fresh"):
            self._prompt.labels(source)  # shown from the beginning, as 0
        for outcome in ("held", "failed"):
            self._pins.labels(outcome)

    def count(self, record: RequestRecord) -> None:
        """One answer that ended."""
        self._recent.append(record)
        self._requests.labels(record.endpoint, record.finish).inc()
        moved = record.moved - record.recomputed  # each token of a prompt counts once
        sources = {"exact": record.exact, "moved": moved, "recomputed": record.recomputed, "fresh": record.fresh}
        for source, tokens in sources.items():
            self._prompt.labels(source).inc(tokens)
        self._new.inc(record.new)
        self._saved.inc(record.saved_ms / 1000)
        self._total.observe(record.total_ms / 1000)
        for histogram, milliseconds in (
            (self._ttft, record.ttft_ms),
            (self._queue, record.queue_ms),
            (self._token, record.token_ms),
        ):
            if milliseconds is not None:
                histogram.observe(milliseconds / 1000)

    def held(self, is_held: bool) -> None:
        """A client asked for a lifetime of what it stored, and got it or not."""
        self._pins.labels("held" if is_held else "failed").inc()

    def responded(self, status: int) -> None:
        """One HTTP response."""
        self._responses.labels(str(status)).inc()

    def recent(self) -> list[dict[str, Any]]:
        """The last requests as JSON takes them, the newest last."""
        return [asdict(record) for record in list(self._recent)]

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)
