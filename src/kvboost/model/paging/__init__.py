"""The running sequence's KV within a budget of memory: blocks, some of them resident, the others spilled."""

from kvboost.model.paging.cache import PagedCache, least_budget, probe_paging
from kvboost.model.paging.generate import paged_generate
from kvboost.model.paging.pager import PagingLedger

__all__ = ["PagedCache", "PagingLedger", "least_budget", "paged_generate", "probe_paging"]
