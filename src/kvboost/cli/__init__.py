"""The command line: ``kvboost calibrate`` and ``kvboost doctor``."""

from kvboost.cli.main import main

__all__ = ["main"]
