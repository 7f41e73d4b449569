"""The KV of a running sequence within a budget of memory: pages, some of them resident, the others spilled."""

from kvboost.offload.kv.cache import PagedCache, min_budget, probe_paging
from kvboost.offload.kv.pager import PagingLedger

__all__ = ["PagedCache", "PagingLedger", "min_budget", "probe_paging"]
