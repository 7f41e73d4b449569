"""Continuous batching: many concurrent jobs over one engine."""
