"""Streamed weights, paged KV, the memory plan."""
