"""What Linux says about this process and what it has cached: used by benchmarks of memory and of the disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks.common.report import BenchError


def memory_status(name: str) -> int:
    """A field of /proc/self/status in bytes, such as VmRSS."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError as error:
        raise BenchError("this benchmark reads /proc/self/status, which only Linux has; run it there") from error
    return int(found[1]) * 1024 if found else 0


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Take these files' pages out of the page cache, as far as nobody has them mapped."""
    for file in files:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
