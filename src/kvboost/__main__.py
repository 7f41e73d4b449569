"""Entry point of ``python -m kvboost``, the same as the command ``kvboost``."""

from __future__ import annotations

import sys

from kvboost.cli import main

if __name__ == "__main__":
    sys.exit(main())
