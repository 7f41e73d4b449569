"""Measurements of the engine, each a command that prints a table: ``python -m kvboost.bench NAME``."""
