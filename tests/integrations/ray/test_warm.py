"""``examples/fleet/warm.py``: a corpus in a shared tier, whoever is killed. One test needs no Ray."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.servers import RedisServer, redis_server
from kvboost import KVBoost
from kvboost.store.admin import open_catalogue
from tests.integrations.ray.conftest import until
from tests.integrations.ray.fleets import kill, text

_PROGRAM = Path(__file__).parents[3] / "examples" / "fleet" / "warm.py"
_DOCUMENTS = 200


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Synthetic documents, some of them longer than others, one empty."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(_DOCUMENTS):
        (folder / f"{number:04}.txt").write_text(text(1000 + number, 30 + number % 50) + "\n")
    (folder / "empty.txt").write_text(" \n")
    return folder


def _stored(place: str) -> int:
    catalogue = open_catalogue(place)
    try:
        return sum(1 for _ in catalogue.entries())
    finally:
        catalogue.close()


def _new_chunks(model: Path, corpus: Path, **engine: Any) -> int:
    """What an engine that knows nothing of the warming still has to prefill."""
    texts = [path.read_text() for path in sorted(corpus.iterdir()) if path.read_text().strip()]
    with KVBoost.from_pretrained(str(model), quality="high", **engine) as reader:
        return reader.add_documents(texts, progress=False)


def test_two_actors_share_a_corpus(model: Path, corpus: Path, tmp_path: Path) -> None:
    program = runpy.run_path(str(_PROGRAM))
    work = program["rows"](corpus)
    assert sum(len(row["paths"]) for row in work) == _DOCUMENTS + 1
    place = {"disk_cache_dir": str(tmp_path / "kv")}
    actors = [program["Prefill"](str(model), {**place, "quality": "high"}) for _ in range(2)]
    stored = 0
    for number, row in enumerate(work[:4]):
        done = actors[number % 2](row)
        assert done["documents"] == len(row["paths"])
        assert done["new"] > len(row["paths"])
        assert done["unsaved"] == 0
        assert _stored(place["disk_cache_dir"]) > stored, "written before it is counted"
        stored = _stored(place["disk_cache_dir"])
    assert actors[1](work[0])["new"] == 0, "the other one has done it"
    assert actors[0](work[-1])["documents"] == len(work[-1]["paths"]) - 1, "an empty one is passed over"


@pytest.fixture
def redis_at(installed: None) -> Any:
    with redis_server() as server:
        yield server


def _command(model: Path, corpus: Path, server: RedisServer) -> list[str]:
    settings = ["--remote-url", server.url, "--quality", "high", "--actors", "2", "--actor-cpus", "0.5"]
    return [sys.executable, str(_PROGRAM), str(model), str(corpus), *settings]


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**environment, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_actor_that_is_killed_changes_nothing(model: Path, corpus: Path, redis_at: RedisServer) -> None:
    killed: list[int] = []

    def strike() -> None:
        until(lambda: _stored(redis_at.url) > 50, seconds=300)
        killed.append(until(_actor_pid, seconds=60))
        kill(killed[0])

    striking = threading.Thread(target=strike)
    striking.start()
    said = _run(_command(model, corpus, redis_at))
    striking.join()
    assert killed
    assert f"{_DOCUMENTS} documents are stored; " in said, "whatever Ray says beside it"
    assert _new_chunks(model, corpus, remote_url=redis_at.url) == 0
    assert _run(_command(model, corpus, redis_at)) == f"{_DOCUMENTS} documents are stored; 0 chunks were new.\n"


def _actor_pid() -> int | None:
    """A process of the pool, as Linux sees it."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                name = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if name.startswith(b"ray::MapWorker") and b"Prefill" in name:
                return int(process.name)
    return None


def test_a_driver_that_is_killed_goes_on_where_it_was(
    model: Path, corpus: Path, tmp_path: Path, redis_at: RedisServer
) -> None:
    command = _command(model, corpus, redis_at)
    log = tmp_path / "driver.log"
    with open(log, "wb") as output:
        first = subprocess.Popen(command, stdout=output, stderr=output, env=_environment(), start_new_session=True)
        try:
            until(lambda: _stored(redis_at.url) > 50 or first.poll() is not None, seconds=300)
            assert first.poll() is None, log.read_text()
        finally:
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()
    partly = _stored(redis_at.url)
    new = int(_run(command).rpartition("; ")[2].partition(" ")[0])
    assert 0 < new < partly + new <= 2 * _stored(redis_at.url)
    assert _new_chunks(model, corpus, remote_url=redis_at.url) == 0
