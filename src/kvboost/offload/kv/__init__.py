"""The KV of a running sequence within a budget of memory: pages, some of them resident, the others spilled."""
