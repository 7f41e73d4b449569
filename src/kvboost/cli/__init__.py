"""The command line: ``kvboost``, also ``python -m kvboost``."""

from kvboost.cli.main import main

__all__ = ["main"]
