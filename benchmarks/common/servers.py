"""Servers of one's own on free ports of this machine, gone afterwards: Redis, a cluster of it, a Mooncake Store.

Used by the benchmarks and by the tests.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.report import BenchError
from kvboost.errors import with_extra

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
        fixed += ["--maxmemory", "4gb", "--maxmemory-policy", "allkeys-lru"]
        process = subprocess.Popen([program, *fixed, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if "--port" not in options:
                _wait_for(port, process)
            yield RedisServer(port, process)
        finally:
            process.kill()
            process.wait()


@dataclass
class RedisCluster:
    """Running masters, each with its share of the slots, and no replicas."""

    nodes: list[RedisServer]

    @property
    def url(self) -> str:
        """Where it is, by all of its nodes: the first one may be gone."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def flush(self) -> None:
        """Empty every node that runs."""
        for node in self.nodes:
            if node.process.poll() is None:
                _cli(node.port, "flushall")


@dataclass
class MooncakeStore:
    """A running Mooncake Store."""

    address: str
    """Of its master."""
    command: list[str]
    """Starts the master."""
    master: subprocess.Popen[bytes]
    memory: subprocess.Popen[bytes]
    """The process that gives it memory."""

    @property
    def url(self) -> str:
        """As a tier has it."""
        return f"mooncake://{self.address}"


_GIVER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
address, size = sys.argv[1], int(sys.argv[2])
print(store.setup("127.0.0.1", "P2PHANDSHAKE", size, 2**24, "tcp", "", address), flush=True)
sys.stdin.read()
"""


def cluster_ports(nodes: int) -> list[int]:
    """Ports of the nodes; each one's bus has its port + 10000.

    Both are below those that the system gives to outgoing connections, which could take one before its node does.
    """
    found: set[int] = set()
    while len(found) < nodes:
        port = random.SystemRandom().randrange(11000, 22000)  # a seed would give every test process the same
        with socket.socket() as one, socket.socket() as bus:
            try:
                one.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
        found.add(port)
    return list(found)


@contextmanager
def redis_cluster(nodes: int = 3) -> Iterator[RedisCluster]:
    """A cluster for one ``with`` block, made with ``redis-cli --cluster create``. Raises BenchError."""
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no"]
    with ExitStack() as stack:
        ports = cluster_ports(nodes)
        servers = [stack.enter_context(redis_server(options, port=port)) for port in ports]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        _cli(ports[0], "--cluster", "create", *addresses, "--cluster-replicas", "0", "--cluster-yes")
        end = time.monotonic() + _START_S
        while not all(b"cluster_state:ok" in _cli(port, "cluster", "info") for port in ports):
            if time.monotonic() > end:
                raise BenchError("the nodes did not become a cluster; try redis-cli --cluster create by hand")
            time.sleep(0.05)
        yield RedisCluster(servers)


@contextmanager
def mooncake_store(segment_bytes: int = 2**28) -> Iterator[MooncakeStore]:
    """A Mooncake Store for one ``with`` block: its master, and one process that gives it memory. Raises BenchError."""
    try:
        import mooncake
        import mooncake.store
    except ImportError as error:
        raise BenchError(f"Mooncake cannot be used ({error}); {with_extra('mooncake')}") from error
    port, metrics = free_port(), free_port()
    program = str(Path(str(mooncake.__file__)).parent / "mooncake_master")
    own = ["-rpc_address", "127.0.0.1", "-metrics_host", "127.0.0.1"]
    command = [program, "-rpc_port", str(port), "-metrics_port", str(metrics), *own]
    giver = [sys.executable, "-c", _GIVER, f"127.0.0.1:{port}", str(segment_bytes)]
    with ExitStack() as stack:
        master = stack.enter_context(_process(command))
        _wait_for(port, master, ping=b"")
        memory = stack.enter_context(_process(giver, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert memory.stdout is not None
        if memory.stdout.readline().strip() != b"0":
            raise BenchError("no memory could be given to the Mooncake Store; try mooncake_master by hand")
        yield MooncakeStore(f"127.0.0.1:{port}", command, master, memory)


@contextmanager
def _process(command: Sequence[str], **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **pipes}
    with subprocess.Popen(command, **quiet) as process:
        try:
            yield process
        finally:
            process.kill()


def _cli(port: int, *arguments: str) -> bytes:
    program = shutil.which("redis-cli")
    if program is None:
        raise BenchError("redis-cli is not installed; on Debian: apt-get install redis-tools")
    done = subprocess.run([program, "-p", str(port), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise BenchError(f"redis-cli failed: {(done.stderr or done.stdout).decode(errors='replace')[-300:]}")
    return done.stdout


def _wait_for(port: int, process: subprocess.Popen[bytes], *, ping: bytes = b"PING\r\n") -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as link:
                link.sendall(ping)
                if not ping or link.recv(64):
                    return
        except OSError:
            time.sleep(0.02)
    raise BenchError(f"{process.args[0]} did not start; try it by hand")  # type: ignore[index]
