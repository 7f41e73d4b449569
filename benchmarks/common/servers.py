"""A real redis-server of one's own: on a free port of this machine, without persistence, gone afterwards.

Used by the benchmarks and by the tests.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvboost.bench.report import BenchError

_START_S = 30.0


@dataclass
class RedisServer:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def redis_server(options: Sequence[str] = (), *, port: int | None = None) -> Iterator[RedisServer]:
    """A server for one ``with`` block. Raises BenchError if redis-server is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        raise BenchError("redis-server is not installed; on Debian: apt-get install redis-server")
    port = port or free_port()
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
        process = subprocess.Popen([program, *fixed, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if "--port" not in options:
                _wait_for(port, process)
            yield RedisServer(port, process)
        finally:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as link:
                link.sendall(b"PING\r\n")
                if link.recv(64):
                    return
        except OSError:
            time.sleep(0.02)
    raise BenchError("redis-server did not start; try it by hand")
