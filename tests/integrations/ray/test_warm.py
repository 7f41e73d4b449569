"""A corpus warmed by Ray actors into a real Redis: once per document, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.faults import Fault, FaultyProxy
from benchmarks.common.servers import RedisServer, redis_server
from kvboost import KVBoost
from kvboost.errors import ConfigError, PlaceError
from kvboost.store.admin import open_catalogue
from tests.integrations.ray.conftest import until
from tests.integrations.ray.fleets import kill, text

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")  # of its own settings
_DOCUMENTS = 200


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Synthetic documents, some of them longer than others, one empty."""
    folder = tmp_path_factory.mktemp("corpus")
    paths = []
    for number in range(_DOCUMENTS):
        path = folder / f"{number:04}.txt"
        path.write_text(text(1000 + number, 30 + number % 50) + "\n")
        paths.append(path)
    (folder / "empty.txt").write_text(" \n")
    return [*paths, folder / "empty.txt"]


def _warming(model: Path, corpus: list[Path], url: str, **settings: Any) -> Any:
    from kvboost.integrations.ray.warm import Warming

    engine = {"remote_url": url, "quality": "high", "cache_bytes": 10**7}
    given = {"actors": 2, "actor_cpus": 0.5, "head": "Answer from the documents.\n", **settings}
    return Warming(model=str(model), engine=engine, paths=corpus, **given)


def _keys(url: str) -> set[bytes]:
    catalogue = open_catalogue(url)
    try:
        return {entry.key for entry in catalogue.entries()}
    finally:
        catalogue.close()


@dataclass(frozen=True)
class Clean:
    """A run that nobody disturbed, into an empty server."""

    survey: Any
    """Before it."""
    plan: Any
    keys: set[bytes]
    """After it."""


@pytest.fixture(scope="module")
def clean(model: Path, corpus: list[Path], cluster: None) -> Clean:
    with redis_server() as server:
        warming = _warming(model, corpus, server.url)
        survey = warming.survey(progress=False)
        plan = warming.plan(survey)
        assert plan.documents == plan.missing == _DOCUMENTS
        assert plan.seconds > 0
        done = warming.run(plan, progress=False)
        assert done.documents == _DOCUMENTS
        assert done.new_chunks > _DOCUMENTS
        assert (done.unsaved, done.left) == (0, 0)
        again = warming.plan(warming.survey(progress=False))
        assert (again.missing, again.groups) == (0, ()), "the second run encodes nothing"
        assert warming.run(again, progress=False).new_chunks == 0
        assert plan.nbytes > 0.5 * _stored_bytes(server.url)
        _all_stored(model, corpus, server.url)
        return Clean(survey, plan, _keys(server.url))


def _stored_bytes(url: str) -> int:
    catalogue = open_catalogue(url)
    try:
        return sum(entry.size for entry in catalogue.entries())
    finally:
        catalogue.close()


def test_actors_that_are_killed_change_nothing(
    model: Path, corpus: list[Path], redis_at: RedisServer, clean: Clean
) -> None:
    warming = _warming(model, corpus, redis_at.url)
    killed: list[int] = []

    def strike() -> None:
        for share in (0.02, 0.2):
            until(lambda share=share: len(_keys(redis_at.url)) > share * len(clean.keys), seconds=300)
            pid = until(_actor_pid, seconds=60)
            kill(pid)
            killed.append(pid)

    striking = threading.Thread(target=strike)
    striking.start()
    done = warming.run(clean.plan, progress=False)
    striking.join()
    assert len(killed) == 2
    assert done.documents == _DOCUMENTS
    assert _keys(redis_at.url) == clean.keys


def _actor_pid() -> int | None:
    """A process of the pool, as Linux sees it."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                name = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if name.startswith(b"ray::MapWorker") and b"_Prefill" in name:
                return int(process.name)
    return None


def test_a_driver_that_is_killed_goes_on_where_it_was(
    model: Path, corpus: list[Path], redis_at: RedisServer, clean: Clean
) -> None:
    command = [sys.executable, "-m", "kvboost", "warm", str(model), str(corpus[0].parent), "--ray"]
    head = corpus[0].parent.parent / "head.md"
    head.write_text("Answer from the documents.\n")
    command += ["--remote-url", redis_at.url, "--quality", "high", "--head", str(head), "--cache-bytes", "10MB"]
    log = corpus[0].parent.parent / "driver.log"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with open(log, "wb") as output:
        first = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            until(lambda: len(_keys(redis_at.url)) > 50 or first.poll() is not None, seconds=300)
            assert first.poll() is None, log.read_text()
        finally:
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()
    partly = _keys(redis_at.url)
    assert partly < clean.keys
    second = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert second.returncode == 0, second.stderr
    assert "of 200 documents are not stored" in second.stderr
    assert "200 of 200" not in second.stderr, "some are there"
    assert "empty.txt: it is empty, or longer than the model takes" in second.stderr
    # A group all of whose documents stood before others is not run again, so there may be fewer.
    assert partly < _keys(redis_at.url) <= clean.keys
    _all_stored(model, corpus, redis_at.url)


def _all_stored(model: Path, corpus: list[Path], url: str) -> None:
    texts = [path.read_text() for path in corpus if path.read_text().strip()]
    with KVBoost.from_pretrained(str(model), remote_url=url, quality="high") as engine:
        assert engine.add_documents(texts, progress=False) == 0


def test_a_budget_is_kept_and_the_next_run_goes_on(
    model: Path, corpus: list[Path], redis_at: RedisServer, clean: Clean
) -> None:
    warming = _warming(model, corpus, redis_at.url)
    half = warming.plan(clean.survey, budget_bytes=clean.plan.nbytes // 2)
    assert half.over_budget > 50
    late = warming.run(half, seconds=0.0, progress=False)
    assert late.new_chunks == 0
    assert late.left == _DOCUMENTS - half.over_budget, "nothing begins after the time is over"
    warming.run(half, progress=False)
    assert _keys(redis_at.url) < clean.keys
    rest = warming.plan(warming.survey(progress=False))
    # The last documents stood before the very first, so they are stored.
    assert half.over_budget - 2 <= rest.missing <= half.over_budget
    assert set(rest.groups) <= set(clean.plan.groups) - set(half.groups)


def test_it_needs_a_shared_tier(installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvboost.cli.main import main

    (tmp_path / "a.txt").write_text("hello")
    assert main(["warm", "no-model", str(tmp_path), "--ray", "--disk-cache-dir", str(tmp_path / "kv")]) == 2
    assert "give --remote-url, where all can write" in capsys.readouterr().err


def test_a_server_that_answers_late_is_not_taken_for_empty(
    model: Path, tmp_path: Path, redis_at: RedisServer, cluster: None
) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(4)]
    for number, path in enumerate(paths):
        path.write_text(text(number, 40))
    with FaultyProxy(redis_at.port) as proxy:
        warming = _warming(model, paths, f"redis://127.0.0.1:{proxy.port}", actors=1)
        warming.run(warming.plan(warming.survey(progress=False)), progress=False)
        proxy.fault = Fault.LATE
        assert warming.plan(warming.survey(progress=False)).missing == 0


def test_documents_that_are_much_alike_are_stored_too(
    model: Path, tmp_path: Path, redis_at: RedisServer, cluster: None
) -> None:
    """Each is cut as on its own, not as another one of the same words that is asked about with it."""
    words = text(7, 12).split()
    paths = [tmp_path / f"{number:02}.txt" for number in range(60)]
    for number, path in enumerate(paths):
        said = [words[(number * 7 + place * (1 + number % 9)) % len(words)] for place in range(40)]
        path.write_text(f"Document {number}: {' '.join(said)}.\n")
    warming = _warming(model, paths, redis_at.url, actors=1)
    warming.run(warming.plan(warming.survey(progress=False)), progress=False)
    assert warming.plan(warming.survey(progress=False)).missing == 0


def test_documents_that_do_not_fit_are_said(model: Path, tmp_path: Path, redis_at: RedisServer, cluster: None) -> None:
    (tmp_path / "long.txt").write_text("word " * 3000)
    with pytest.raises(ConfigError, match="no document that fits"):
        _warming(model, [tmp_path / "long.txt"], redis_at.url).survey(progress=False)


def test_a_file_that_is_no_text_is_named(model: Path, tmp_path: Path, redis_at: RedisServer, cluster: None) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises((ConfigError, PlaceError), match="bytes.txt cannot be read as UTF-8"):
        _warming(model, [tmp_path / "bytes.txt"], redis_at.url).survey(progress=False)


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, redis_at: RedisServer, cluster: None) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match="an actor failed: .*") as failed:
        _warming(tmp_path / "no-model", [tmp_path / "a.txt"], redis_at.url).survey(progress=False)
    assert "\n" not in str(failed.value)


def test_what_an_actor_could_not_save_is_counted_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: None
) -> None:
    told = [("a", 1, 5), ("b", 1, 2), ("a", 3, 4), ("a", 2, 7)]  # after its third group the first has saved some
    rows = [
        {"documents": 1, "new": 1, "left": False, "actor": actor, "groups": groups, "unsaved": unsaved}
        for actor, groups, unsaved in told
    ]
    warming = _warming(model, [tmp_path / "a.txt"], "redis://127.0.0.1:1")
    monkeypatch.setattr(type(warming), "_run", lambda *_, **__: iter(rows))
    plan = SimpleNamespace(groups=[((), (0,))])
    assert warming.run(plan, progress=False).unsaved == 4 + 2


def test_a_tier_that_is_away_is_said_in_our_words(model: Path, tmp_path: Path, cluster: None) -> None:
    """Not as Ray's trace of what its actor raised."""
    (tmp_path / "a.txt").write_text(text(1, 40))
    with redis_server() as redis:
        url = redis.url
    with pytest.raises(PlaceError, match="does not answer; warm again when it does"):
        _warming(model, [tmp_path / "a.txt"], url).survey(progress=False)
