"""Metrics, traces and recent requests."""
