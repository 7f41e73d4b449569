"""Entry point of ``python -m kvboost.bench``."""

from __future__ import annotations

import sys

from kvboost.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
