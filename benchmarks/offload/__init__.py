"""Streamed weights, paged KV, speculation, the memory plan."""
