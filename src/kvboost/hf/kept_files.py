"""What is found out at one start and kept for the next, in the user's cache directory.

Used for the digests of weights and for studies. Invariants: a file is replaced as a
whole, and nobody else can read it; there are no more of a kind than a few dozen.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_directory() -> Path:
    """Where such files are."""
    if own := os.environ.get("KVBOOST_CACHE_HOME"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvboost"


_MOST = 64  # files of one kind: a container may give the same checkpoint another inode at every start


def write_whole(path: Path, content: str) -> None:
    """Write a file whole or not at all: other processes read it. The oldest beside it go. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8") as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            with suppress(OSError):
                os.unlink(file.name)
            raise
    with suppress(OSError):  # another process may remove them too
        for old in sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime)[:-_MOST]:
            old.unlink()
