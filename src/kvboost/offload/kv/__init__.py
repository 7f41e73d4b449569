"""The running sequence's KV within a budget of memory: blocks, some of them resident, the others spilled."""

from kvboost.offload.kv.cache import PagedCache, least_budget, probe_paging
from kvboost.offload.kv.generate import paged_generate
from kvboost.offload.kv.pager import PagingLedger

__all__ = ["PagedCache", "PagingLedger", "least_budget", "paged_generate", "probe_paging"]
