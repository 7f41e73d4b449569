"""A server's memory does not grow by what malloc keeps, and it has files for its connections."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from kvboost.serve import Limits
from kvboost.serve.process import with_enough_files

glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc has no such settings")

_MANY_THREADS = """
import ctypes, threading
from kvboost.serve.process import share_malloc

def work():
    kept = [bytearray(1000) for _ in range(1000)]
    over.wait()

over = threading.Event()
share_malloc()
threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads:
    thread.start()
ctypes.CDLL(None).malloc_stats()
over.set()
"""


@glibc_only
def test_threads_of_a_server_share_the_areas_of_malloc() -> None:
    done = subprocess.run([sys.executable, "-c", _MANY_THREADS], capture_output=True, text=True, check=True)
    assert done.stderr.count("Arena ") <= 4, "each thread has one of its own, and keeps what it held at its peak"


_HOLES = """
import ctypes, sys, time
from kvboost.serve.process import trimmed_malloc

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("RssAnon"))

every_s = float(sys.argv[1])
with trimmed_malloc(every_s):
    blocks = [ctypes.create_string_buffer(b"x" * 60_000) for _ in range(2000)]
    full = held()
    del blocks[::2]  # what is left keeps the heap from shrinking
    end = time.monotonic() + min(20.0, 400 * every_s)
    while held() > full - 40 and time.monotonic() < end:
        time.sleep(0.01)
    print(full - held())
"""


@glibc_only
@pytest.mark.parametrize(("every_s", "is_given_back"), [(0.05, True), (1000.0, False)])
def test_holes_between_what_is_held_are_given_back(every_s: float, is_given_back: bool) -> None:
    command = [sys.executable, "-c", _HOLES, str(every_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (int(done.stdout) >= 40) == is_given_back


def test_it_may_open_a_file_for_each_connection() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = Limits(max_connections=1024)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        assert with_enough_files(limits) is limits
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024 + 128, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("soft", "hard", "taken"), [(600, 1000, 1000 - 128), (100, 200, 100), (600, -1, 600 - 128)], ids=str
)
def test_it_takes_as_many_connections_as_it_may_open_files(
    soft: int, hard: int, taken: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resource = pytest.importorskip("resource")

    def limit(_: int, wanted: tuple[int, int]) -> None:
        if hard == -1:
            raise ValueError("current limit exceeds maximum limit")  # as macOS has it

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", limit)
    assert with_enough_files(Limits(max_connections=1024)).max_connections == taken
    assert f"it takes {taken} connections and not 1024; raise the limit (ulimit -Hn) to 1152" in caplog.text
