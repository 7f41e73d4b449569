"""Known faults of the vLLM connector, and counts of what happens in an engine. For ``vllm_child``, in vLLM's Python."""

from __future__ import annotations

from collections import Counter
from typing import Any


def count_events() -> Counter[str]:
    """Steps of the worker, preemptions, and the connector's own counts, from now on."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvboost.integrations.vllm import worker

    counts: Counter[str] = Counter()
    begin, take = worker.WorkerSide.begin, worker.WorkerSide.drain_counts
    preempt = Scheduler._preempt_request

    def counted_begin(self: Any, orders: Any) -> None:
        counts["steps"] += 1
        begin(self, orders)

    def counted_take(self: Any) -> dict[str, int]:
        taken = take(self)
        counts.update(taken)
        return taken

    def counted_preempt(self: Any, *request: Any, **how: Any) -> None:
        counts["preemptions"] += 1
        preempt(self, *request, **how)

    worker.WorkerSide.begin = counted_begin  # type: ignore[method-assign]
    worker.WorkerSide.drain_counts = counted_take  # type: ignore[method-assign]
    Scheduler._preempt_request = counted_preempt
    return counts


def seed_fault(name: str) -> None:
    """Put a known fault into the connector."""
    from kvboost.errors import UnsupportedModelError
    from kvboost.integrations.vllm import connector, identity, scheduler, worker

    if name == "salt ignored":
        plain = identity.RequestKeys.of
        identity.RequestKeys.of = lambda self, salt, lora: plain(self, None, lora)  # type: ignore[method-assign]
    elif name == "adapter ignored":
        plain = identity.RequestKeys.of
        identity.RequestKeys.of = lambda self, salt, lora: plain(self, salt, None)  # type: ignore[method-assign]
    elif name in ("a load fails", "a load fails, and its step is kept"):
        write, end = worker.WorkerSide._write, worker.WorkerSide.end

        def fail_once(self: Any, order: Any) -> None:
            worker.WorkerSide._write = write  # type: ignore[method-assign]
            raise RuntimeError("seeded")

        def keep_all(self: Any, orders: Any) -> None:
            orders.failures = self._failures
            end(self, orders)

        worker.WorkerSide._write = fail_once  # type: ignore[method-assign]
        if name != "a load fails":
            worker.WorkerSide.end = keep_all  # type: ignore[method-assign]
    elif name == "a fetch is never answered":
        worker.WorkerSide._fetch = lambda self, fetch: None  # type: ignore[method-assign]
    elif name == "lookups are not awaited":
        scheduler.SchedulerSide._await_lookup = lambda self: False  # type: ignore[method-assign]
    elif name == "pages of before a preemption":
        scheduled = scheduler.SchedulerSide._scheduled

        def extend(self: Any, request: str, pages: Any, *, anew: bool, **step: Any) -> None:
            scheduled(self, request, pages, anew=False, **step)

        scheduler.SchedulerSide._scheduled = extend  # type: ignore[method-assign]
    elif name == "approximate KV is kept":
        takes_part = scheduler.SchedulerSide._scheduled

        def keep_too(self: Any, request: str, *step: Any, **how: Any) -> None:
            if (tracked := self._requests.get(request)) is not None:
                tracked.apart = False
            takes_part(self, request, *step, **how)

        scheduler.SchedulerSide._scheduled = keep_too  # type: ignore[method-assign]
    elif name == "weights ignored":
        identity._weights = lambda model, load: ""
    elif name == "more is claimed than is held":
        told = scheduler.SchedulerSide.learn

        def claim_all(self: Any, report: Any) -> None:
            report.held = {number: len(self._fetches[number].wanted) for number in report.held}
            told(self, report)

        scheduler.SchedulerSide.learn = claim_all  # type: ignore[method-assign]
    elif name == "one page off":
        plain_slots = worker.slots_of
        worker.slots_of = lambda pages, **at: plain_slots(pages.roll(1), **at)
    elif name == "shared pages":
        scheduler.set_apart = lambda request: None
    elif name in ("pages cannot be read", "pages cannot be read, and nobody says so"):

        def unreadable(*layer: Any, **shape: Any) -> Any:
            raise UnsupportedModelError("seeded")

        worker.learn_order = unreadable
        if name != "pages cannot be read":
            connector.KVBoostConnector.build_connector_worker_meta = lambda self: None  # type: ignore[method-assign]
    else:
        raise ValueError(name)
