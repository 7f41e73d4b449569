"""How fast `kvboost warm --ray` warms a corpus, by actors, and that a second run encodes nothing.

Each number of actors has an empty Redis of its own. A time is of the whole command, with Ray, models and the first
pass over the documents; the time of a corpus of a few documents beside it is what starting takes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common.measure import positive
from benchmarks.common.ray_fleet import ENVIRONMENT, ray_python
from benchmarks.common.report import BenchError, Progress, Report
from benchmarks.common.servers import RedisServer, redis_server
from benchmarks.internals import light_tokenizer

QUICK = {"documents": 40, "actors": [1, 2]}
_DONE = re.compile(r"(\d+) documents were prefilled; (\d+) chunks were new")
_WORDS = ("river", "stone", "letter", "garden", "winter", "market", "engine", "island", "copper", "window")
_FEW = 8  # documents; what starting takes


@dataclass(frozen=True)
class Warmed:
    """One call of the command."""

    seconds: float
    documents: int
    chunks: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="default: a tiny one, made on the spot")
    parser.add_argument("--ray-venv", type=Path, metavar="FOLDER", help="an environment with Ray and kvboost")
    parser.add_argument("--documents", type=positive, default=20_000, help="default 20,000")
    parser.add_argument("--words", type=positive, default=24, help="of a document (default 24)")
    parser.add_argument("--actors", type=positive, nargs="+", default=[1, 2, 4], help="default 1 2 4")


def run(args: argparse.Namespace) -> Report:
    """Warm with each number of actors, twice."""
    python = ray_python(args.ray_venv)
    report = Report("ray_warming")
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or _tiny(Path(scratch))
        model = model.expanduser().resolve()
        few = _corpus(Path(scratch) / "few", count=_FEW, words=args.words)
        corpus = _corpus(Path(scratch) / "corpus", count=args.documents, words=args.words)
        tokenizer = light_tokenizer(str(model))
        tokens = sum(len(tokenizer(file.read_text())["input_ids"]) for file in corpus.iterdir())
        table = report.table(
            f"{args.documents:,} documents with {tokens:,} tokens into an empty Redis",
            ["actors", "starting s", "first run s", "documents/s", "tokens/s", "keys", "second run s", "new chunks"],
            dtype="float32",
            model=model,
        )
        progress = Progress("runs", 3 * len(args.actors))
        for actors in args.actors:
            with redis_server() as server:
                told = []
                for folder in (few, corpus, corpus):
                    told.append(_warm(python, model, folder, actors=actors, server=server))
                    progress.step()
                    keys = _keys(server)
                start, first, again = told
                rest = first.seconds - start.seconds
                rates = [f"{count / rest:.0f}" if rest > start.seconds else "-" for count in (first.documents, tokens)]
                table.add(
                    actors,
                    f"{start.seconds:.1f}",
                    f"{first.seconds:.1f}",
                    *rates,
                    keys,
                    f"{again.seconds:.1f}",
                    again.chunks,
                )
                report.failed |= first.documents != args.documents or again.documents != 0 or again.chunks != 0
                report.raw[f"{actors} actors"] = [asdict(one) for one in told]
        table.notes.append(
            f"starting: the command on {_FEW} other documents; documents/s and tokens/s are without it, and left out "
            "where it is most of the time. The second run must prefill nothing. OMP_NUM_THREADS=1 for each actor."
        )
    return report


def _tiny(folder: Path) -> Path:
    from tests.helpers.serving import tiny_folder

    return tiny_folder(folder / "tiny-llama")


def _corpus(folder: Path, *, count: int, words: int) -> Path:
    """Files of made-up words that are all different, the same in every run; of another folder others."""
    folder.mkdir()
    for number in range(count):
        said = [_WORDS[(number * 7 + place * (1 + number % 9)) % len(_WORDS)] for place in range(words)]
        (folder / f"{number:06}.txt").write_text(f"Document {number} of {folder.name}: {' '.join(said)}.\n\n")
    return folder


def _warm(python: Path, model: Path, corpus: Path, *, actors: int, server: RedisServer) -> Warmed:
    command: Sequence[str] = [
        *(str(python), "-m", "kvboost", "warm", str(model), str(corpus), "--ray", "--actors", str(actors)),
        *("--quality", "high", "--remote-url", server.url, "--dtype", "float32", "--chunk-size", "16"),
    ]
    began = time.monotonic()
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    found = _DONE.search(done.stdout)
    if done.returncode or found is None:
        raise BenchError(f"kvboost warm ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return Warmed(seconds, int(found[1]), int(found[2]))


def _keys(server: RedisServer) -> int:
    import redis

    with redis.Redis(port=server.port) as client:
        return int(client.dbsize())
