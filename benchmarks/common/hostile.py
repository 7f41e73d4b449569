"""A client that means harm, in a process of its own: much to read, to parse and to tokenise, and nothing to answer.

Started by the benchmarks `hostile` and `soak`, with low priority, so that what is measured is the server and not the
client beside it. Every request is broken, too large or abandoned, so that none becomes a job of the model. Writes
``ready``, waits for a line, sends for the time it was given, and writes what it saw as one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NICE = 10
_MIB = 2**20
_ANSWER_S = 120.0
_WORDS = ["stone", "river", "seven", "green", "north", "paper", "cloud", "ninth", "glass", "amber", "quiet", "round"]


@dataclass(frozen=True)
class Attack:
    """A request, and how much of it is sent and waited for."""

    name: str
    path: str
    body: bytes
    sent: float = 1.0
    """How much of the body; less than 1 to go away in the middle of it."""
    patience: float = _ANSWER_S
    """Seconds to wait for an answer."""


def attacks(model: str, characters: int) -> list[Attack]:
    """The mix. ``characters`` are as many as the server tokenises before it knows that a prompt is too long."""
    chat, words = "/v1/chat/completions", _words(characters)

    def asked(messages: list[dict[str, Any]], **more: Any) -> bytes:
        return json.dumps({"model": model, "messages": messages, **more}).encode()

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def filled(before: str, entry: str, after: str) -> bytes:
        """As many entries as go into a body."""
        count = (4 * _MIB - len(before) - len(after) - 64) // (len(entry) + 1)
        return (before + ",".join([entry] * count) + after).encode()

    opened = f'{{"model": "{model}", "messages": [{{"role": "user", "content": ['
    parts = ",".join(['{"type":"text","text":""}'] * 90_000)
    each = characters // 1000
    many = [{"role": ("user", "assistant")[n % 2], "content": words[n * each : (n + 1) * each]} for n in range(1000)]
    whole = asked([user(_words(4 * _MIB - 200))])
    tags, braces = "<tool_call>" * (characters // 22), '{"a":' * (characters // 10)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": braces}}
    lists = {**call, "function": {"name": "f", "arguments": '{"a":[' + "[]," * 1_300_000 + "[]]}"}}
    said = {"role": "tool", "tool_call_id": "c", "content": tags + braces}
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": "a{1,9}"} for n in range(1200)}}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    return [
        Attack("4 MiB of text", chat, whole),
        Attack("4 MiB of lists", chat, filled(opened, "[]", "]}]}")),
        Attack("4 MiB of strings", "/v1/completions", b'{"model": ' + b'""' * (2 * _MIB - 10) + b"}"),
        Attack("90,000 parts", chat, (opened + parts + "]}]}").encode()),
        Attack("ids", "/v1/completions", filled(f'{{"model": "{model}", "prompt": [', "1234567890123", "]}")),
        Attack("deep JSON", chat, b'{"messages": ' + b"[" * 250_000),
        Attack("1,000 messages", chat, asked(many)),
        Attack("1,000 messages, counted", "/v1/messages/count_tokens", asked(many)),
        Attack("tool output", chat, asked([user("call it"), said])),
        Attack("deep arguments", chat, asked([user("x"), {"role": "assistant", "tool_calls": [call]}, said])),
        Attack("lists in arguments", chat, asked([user("x"), {"role": "assistant", "tool_calls": [lists]}])),
        Attack("large schema", chat, asked([user("x")], response_format=shape, max_tokens=10**9)),
        Attack("left in the upload", chat, whole, sent=0.5, patience=0.0),
        Attack("left in the tokenising", chat, asked(many), patience=0.05),
    ]


def _words(characters: int) -> str:
    rng = random.Random(1)
    return " ".join(rng.choice(_WORDS) for _ in range(characters // 5))[:characters]


class Hostile:
    """Connections that attack until the time is over."""

    def __init__(self, port: int, key: str, mix: list[Attack]) -> None:
        self._port, self._key, self._mix = port, key, mix
        self.statuses: Counter[str] = Counter()

    async def run(self, connections: int, seconds: float) -> None:
        """All of them; each begins its next request when the last one has ended."""
        end = time.monotonic() + seconds

        async def one(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < end:
                attack = rng.choice(self._mix)
                try:
                    status = await self._send(attack)
                except OSError as error:  # cut off before the answer was read, or no connection
                    status = type(error).__name__
                self.statuses[f"{attack.name}: {status}"] += 1

        await asyncio.gather(*(one(number) for number in range(connections)))

    async def _send(self, attack: Attack) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = (
                f"POST {attack.path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._key}\r\n"
                f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(attack.body)}\r\n\r\n"
            )
            writer.write(head.encode() + attack.body[: int(len(attack.body) * attack.sent)])
            with suppress(ConnectionError):  # a server that has refused reads no more, but its answer may be there
                await writer.drain()
            async with asyncio.timeout(attack.patience):
                line = await reader.readline()
            return line.split()[1].decode() if line else "closed"
        except TimeoutError:
            return "no answer" if attack.patience == _ANSWER_S else "left"
        finally:
            writer.transport.abort()


@dataclass
class Seen:
    """What the client saw, and what it cost."""

    statuses: Counter[str]
    seconds: float
    cpu_seconds: float

    @property
    def by_status(self) -> Counter[str]:
        """Of all attacks together."""
        found: Counter[str] = Counter()
        for name, count in self.statuses.items():
            found[name.rpartition(": ")[2]] += count
        return found

    @property
    def failures(self) -> dict[str, int]:
        """Answers of 5xx other than 503, and answers that never came."""
        wrong = ("no answer", *(str(status) for status in range(500, 600) if status != 503))
        return {name: count for name, count in self.statuses.items() if name.rpartition(": ")[2] in wrong}


class HostileProcess:
    """The client as its parent has it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def seen(self) -> Seen:
        """Wait for its end."""
        out, _ = self._process.communicate()
        told = json.loads(out)
        return Seen(Counter(told["statuses"]), told["seconds"], told["cpu_seconds"])


@contextmanager
def hostile(
    port: int, key: str, *, model: str, characters: int, connections: int, seconds: float
) -> Iterator[HostileProcess]:
    """The client for one ``with`` block. It has made its bodies when the block begins."""
    command = [sys.executable, "-m", "benchmarks.common.hostile", "--port", str(port), "--model", model]
    command += ["--characters", str(characters), "--connections", str(connections), "--seconds", str(seconds)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"HOSTILE_KEY": key},
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.write("go\n")
        process.stdin.flush()
        yield HostileProcess(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            pipe.close()


def main() -> None:
    """The process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("port", "characters", "connections"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    os.nice(_NICE)
    client = Hostile(args.port, os.environ["HOSTILE_KEY"], attacks(args.model, args.characters))
    print("ready", flush=True)
    sys.stdin.readline()
    began, cpu = time.monotonic(), time.process_time()
    asyncio.run(client.run(args.connections, args.seconds))
    told = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps({"statuses": client.statuses, **told}), flush=True)


if __name__ == "__main__":
    main()
