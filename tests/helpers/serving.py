"""`kvboost serve` in a process of its own, over a tiny model: for benchmarks that must see what people run."""

from __future__ import annotations

import os
import secrets
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.servers import free_port
from tests.helpers.models import tiny_model
from tests.helpers.tokenizer import byte_tokenizer

_START_S = 300.0


class ServeProcess:
    """A running server. ``code`` is its exit code once the block is left."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        port: int,
        *,
        admin_key: str | None = None,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        """``trusted``: it speaks TLS, and this knows its certificate."""
        self.process, self.port = process, port
        self.verify: ssl.SSLContext | bool = trusted or True
        self._headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self.code: int | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}" if self.verify is True else f"https://localhost:{self.port}"

    def cache(self) -> dict[str, Any]:
        """GET /v1/cache."""
        told: dict[str, Any] = httpx.get(
            self.url + "/v1/cache", headers=self._headers, timeout=60, verify=self.verify
        ).json()
        return told

    def idle(self) -> bool:
        """Whether nothing runs, waits, is held or is leased."""
        told = self.cache()
        nothing = {"running": 0, "waiting": 0, "kv_bytes": 0}
        return told["load"] == nothing and told["streams"] == 0 and told["cache"]["leased_chunks"] == 0

    def resources(self) -> dict[str, float]:
        """Memory in MB, threads and open files, as Linux counts them."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return {
            "rss": int(fields["VmRSS"].split()[0]) / 1000,
            "anonymous": int(fields["RssAnon"].split()[0]) / 1000,
            "threads": int(fields["Threads"]),
            "files": len(os.listdir(f"/proc/{self.process.pid}/fd")),
        }

    def cpu_seconds(self) -> float:
        """Time of a processor that it has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class KeyFiles:
    """Keys of two users and of the admin, in files that a server reads."""

    first: str
    second: str
    admin: str
    options: tuple[str, ...]
    """Of ``kvboost serve``."""
    file: Path
    """Of the users' keys."""


def key_files(folder: Path) -> KeyFiles:
    """New keys, and a secret of their own."""
    first, second, admin, secret = (secrets.token_hex(32) for _ in range(4))
    options: list[str] = []
    for flag, lines in (("api-key", f"{first}\n{second}"), ("admin-key", admin), ("secret", secret)):
        file = folder / flag
        file.touch(mode=0o600)
        file.write_text(lines + "\n")
        options += [f"--{flag}-file", str(file)]
    return KeyFiles(first, second, admin, tuple(options), folder / "api-key")


def tiny_folder(folder: Path, *, family: str = "llama", **overrides: Any) -> Path:
    """A tiny model with a tokenizer of bytes, as a folder that any server can load."""
    model = tiny_model(family, **{"vocab_size": 260, "max_position_embeddings": 2048, **overrides})
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_adapter(folder: Path) -> Path:
    """A LoRA adapter of the tiny model, as a folder."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(tiny_model("llama", vocab_size=260, max_position_embeddings=2048), config).save_pretrained(folder)
    return folder


@contextmanager
def kvboost_serve(
    model: Path,
    options: Sequence[str] = (),
    *,
    settings: Mapping[str, str] | None = None,
    log: Path | None = None,
    admin_key: str | None = None,
    trusted: ssl.SSLContext | None = None,
) -> Iterator[ServeProcess]:
    """The server for one ``with`` block; ended with SIGTERM. ``settings`` are those that have no flag.

    ``trusted`` is for one whose options name a certificate.
    """
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "kvboost",
        "serve",
        str(model),
        "--port",
        str(port),
        "--served-model-name",
        "model",
        *options,
    ]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    environment |= {f"KVBOOST_{name.upper()}": value for name, value in (settings or {}).items()}
    with open(log or os.devnull, "wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    running = ServeProcess(process, port, admin_key=admin_key, trusted=trusted)
    try:
        _wait_for(running)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            running.code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _wait_for(running: ServeProcess) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and running.process.poll() is None:
        try:
            if httpx.get(running.url + "/health", timeout=5, verify=running.verify).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise RuntimeError("kvboost serve did not start; give a log to see why")
