"""Blocks in a Redis or Valkey server."""
