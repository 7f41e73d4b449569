"""Blocks in a Redis or Valkey server, a cluster of them, or a Mooncake Store."""
