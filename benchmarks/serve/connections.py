"""1,100 sockets that promise a body and send none, or never finish a TLS handshake: what /health notices, and the end.

A real server in a process of its own for each kind: GET and POST, with a key and without, handshakes of which nothing
or a part comes. All sockets are opened at once, and again every ten seconds those that the server has closed. /health
is asked ten times a second, each time on a connection of its own, from before the first socket to SIGTERM. The sockets
stay open until the server has ended.

Passes if /health has a 99th percentile under 100 ms, is always answered, and the server stops within 5 s, with code 0.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import select
import socket
import ssl
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.common.measure import positive
from benchmarks.common.report import Report
from benchmarks.serve.hostile import quantile
from kvboost.bench.report import say
from tests.helpers.certificates import self_signed
from tests.helpers.serving import ServeProcess, key_files, kvboost_serve, tiny_folder

QUICK = {"sockets": 200, "seconds": 2.0}
_HEALTH_EVERY_S = 0.1
_AGAIN_EVERY_S = 10.0
_MAX_HEALTH_MS = 100.0
_MAX_STOP_S = 5.0
_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the first bytes of a TLS handshake


def promise(method: str, key: str | None) -> bytes:
    """The headers of a request whose body never comes."""
    path = "/v1/models" if method == "GET" else "/v1/completions"
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}Content-Length: 1000\r\n\r\n".encode()


class Sockets:
    """As many as are wanted, each of which has sent ``sent`` and waits."""

    def __init__(self, port: int, count: int, sent: bytes) -> None:
        self._port, self._sent = port, sent
        self._open: list[socket.socket] = []
        self._count = count
        self.opened = 0

    def open(self) -> None:
        """Open those that were never opened, and again those that the server has closed."""
        readable = select.poll()
        for one in self._open:
            readable.register(one, select.POLLIN)
        kept = {one.fileno(): one for one in self._open}
        for number, _ in readable.poll(0):
            try:
                closed = not kept[number].recv(65536)  # an answer is read first
            except OSError:
                closed = True
            if closed:
                kept.pop(number).close()
        self._open = list(kept.values())
        for _ in range(self._count - len(self._open)):
            self._open.append(made := socket.create_connection(("127.0.0.1", self._port)))
            made.sendall(self._sent)
            made.setblocking(False)
            self.opened += 1

    def close(self) -> None:
        """All of them."""
        for one in self._open:
            one.close()


@dataclass
class Seen:
    """What was seen of one kind."""

    kind: str
    health: list[float] = field(default_factory=list)
    """Seconds of each /health."""
    failed: int = 0
    """Times that /health was not answered."""
    opened: int = 0
    files: float = 0
    """Of the server at the end."""
    rss: float = 0
    stop: float = 0
    """Seconds from SIGTERM to its end."""
    code: int | None = None

    @property
    def passed(self) -> bool:
        """Whether all bars are met."""
        quick = 1000 * quantile(self.health, 99) < _MAX_HEALTH_MS and self.stop < _MAX_STOP_S
        return quick and self.failed == 0 and self.code == 0


class Probe:
    """Asks /health until it is ended."""

    def __init__(self, server: ServeProcess, seen: Seen) -> None:
        self._server, self._seen = server, seen
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def end(self) -> None:
        """No more."""
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        began = time.monotonic()
        headers = {"Connection": "close"}
        with httpx.Client(verify=self._server.verify, headers=headers, timeout=30, trust_env=False) as client:
            for number in itertools.count():
                if self._over.wait(max(0.0, began + number * _HEALTH_EVERY_S - time.monotonic())):
                    return
                asked = time.perf_counter()
                try:
                    self._seen.failed += client.get(self._server.url + "/health").status_code != 200
                except httpx.TransportError:
                    self._seen.failed += 1
                self._seen.health.append(time.perf_counter() - asked)


def measure(args: argparse.Namespace, scratch: Path, kind: str, sent: bytes, options: list[str]) -> Seen:
    """One server, one kind of sockets."""
    trusted = ssl.create_default_context(cafile=scratch / "cert.pem") if "--tls-cert-file" in options else None
    seen = Seen(kind)
    with ExitStack() as last:
        with kvboost_serve(scratch / "model", options, log=args.log, trusted=trusted) as server:
            sockets = Sockets(server.port, args.sockets, sent)
            last.callback(sockets.close)
            probe = Probe(server, seen)
            try:
                began = time.monotonic()
                while time.monotonic() < began + args.seconds:
                    sockets.open()
                    time.sleep(min(_AGAIN_EVERY_S, max(0.0, began + args.seconds - time.monotonic())))
                sockets.open()
                time.sleep(1)
                resources = server.resources()
            finally:
                probe.end()
            ending = time.monotonic()
        seen.stop = time.monotonic() - ending
        seen.opened, seen.files, seen.rss, seen.code = sockets.opened, resources["files"], resources["rss"], server.code
    say(f"{kind}: p99 {1000 * quantile(seen.health, 99):.0f} ms, stopped in {seen.stop:.1f} s")
    return seen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--sockets", type=positive, default=1100, help="open at the same time (default 1,100)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind (default 60)")
    parser.add_argument("--log", type=Path, help="what the last server says")


def run(args: argparse.Namespace) -> Report:
    """Each kind in turn."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, args.sockets + 256)), hard))
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        keys = key_files(scratch)
        tiny_folder(scratch / "model")
        certificate, private = self_signed(scratch)
        tls = [*keys.options, "--tls-cert-file", str(certificate), "--tls-key-file", str(private)]
        kinds = [
            (f"{method}, {'a' if key else 'no'} key", promise(method, key), [*keys.options])
            for method in ("GET", "POST")
            for key in (keys.first, None)
        ]
        kinds += [("TLS, nothing sent", b"", tls), ("TLS, a part sent", _HELLO, tls)]
        found = [measure(args, scratch, *kind) for kind in kinds]
    report = Report("connections", raw=found)
    report.failed = not all(seen.passed for seen in found)
    columns = ["kind", "/health p50, p99, max, ms", "asked, failed", "opened", "files", "RSS, MB", "stop, s", "code"]
    table = report.table(f"{args.sockets} sockets, {args.seconds:g} s a kind", columns, model="tiny-llama")
    for seen in found:
        health = [quantile(seen.health, 50), quantile(seen.health, 99), max(seen.health)]
        table.add(
            seen.kind,
            " / ".join(f"{1000 * value:.1f}" for value in health),
            f"{len(seen.health)}, {seen.failed}",
            f"{seen.opened:,}",
            f"{seen.files:.0f}",
            f"{seen.rss:.0f}",
            f"{seen.stop:.1f}",
            seen.code,
        )
    return report
