"""Tiers, records, eviction, codecs."""
