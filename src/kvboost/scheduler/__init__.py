"""Continuous batching: many jobs side by side over one engine."""
