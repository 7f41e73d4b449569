from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from kvboost.direct_io import PAGE, DirectFile, page_aligned, up_to_page


@pytest.fixture
def three_pages(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 * PAGE - 100))
    return path


def test_memory_begins_at_a_page() -> None:
    for size in (1, PAGE, 10 * PAGE + 1):
        memory = page_aligned(size)
        assert len(memory) == size
        assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE == 0
    assert [up_to_page(size) for size in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]


def test_reads_a_stretch_and_stops_at_the_end(three_pages: Path) -> None:
    bytes_there = three_pages.read_bytes()
    with DirectFile(three_pages) as file:
        assert file.size == len(bytes_there)
        buffer = page_aligned(2 * PAGE)
        assert file.read(buffer, PAGE) == 2 * PAGE - 100
        assert bytes(buffer[: 2 * PAGE - 100]) == bytes_there[PAGE:]
        assert file.read(buffer[:PAGE], 0) == PAGE
        assert bytes(buffer[:PAGE]) == bytes_there[:PAGE]


class _Refuses(DirectFile):
    refusals = 0

    def _preadv(self, buffer: memoryview, offset: int) -> int:
        if self.direct:
            self.refusals += 1
            raise OSError(errno.EINVAL, "no direct reads here")
        return super()._preadv(buffer[:1000], offset)  # and in bits and pieces


def test_a_file_system_that_refuses_is_read_plainly(three_pages: Path) -> None:
    with _Refuses(three_pages) as file:
        buffer = page_aligned(3 * PAGE)
        assert file.read(buffer, 0) == 3 * PAGE - 100
        assert bytes(buffer[: file.size]) == three_pages.read_bytes()
        assert not file.direct


def test_a_read_that_fails_is_told(three_pages: Path) -> None:
    file = DirectFile(three_pages)
    file.close()
    with pytest.raises(OSError):
        file.read(page_aligned(PAGE), 0)
    with pytest.raises(FileNotFoundError):
        DirectFile(three_pages.with_name("gone"))
