"""The limit of a cache directory, in a file of its own: it belongs to the directory and not to whoever writes there.

Used by the disk tier and by ``kvboost cache limit``. Not in the index, which is made anew when it breaks. Invariant:
once there is a limit, only :func:`write_capacity` changes it. Callers hold the lock of the index while they write.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvboost.store.tiers.disk.files import Layout

_MAX_DIGITS = 19


def read_capacity(layout: Layout) -> int | None:
    """The directory's limit in bytes; None if it has none yet. Raises OSError."""
    try:
        text = layout.capacity.read_bytes()[: _MAX_DIGITS + 1].strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else None  # None: a torn file is written anew


def write_capacity(layout: Layout, capacity: int) -> None:
    """Set the limit for everybody who uses the directory, from their next write on. Raises OSError."""
    part = Path(f"{layout.capacity}.part")
    part.unlink(missing_ok=True)  # of a writer that was killed
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"%d\n" % capacity)
        file.flush()
        os.fsync(file.fileno())
    part.replace(layout.capacity)
